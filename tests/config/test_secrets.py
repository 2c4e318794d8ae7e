"""A secret is never printed, wherever a user has written it: no message, log line, repr or JSON.

A random secret stands in every place that a user might put one, also a wrong one. Whatever comes of
the configuration is searched for it, for pieces of it, and for how it looks in urls, JSON and
base64.
"""

import base64
import io
import json
import logging
import random
import string
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_offload.commands.cli import main
from safe_offload.commands.doctor.configuration import Written, check_arguments, check_written
from safe_offload.commands.doctor.report import render
from safe_offload.commands.doctor.vllm_facts import VllmFacts
from safe_offload.config.options import OffloadConfig
from safe_offload.config.tiers import TIER_KEYS
from safe_offload.config.transfer_config import CONNECTOR_NAME
from safe_offload.errors import ConfigError
from safe_offload.start import plugin
from safe_offload.tiers.choice import open_tier

PIECE, NUMBER_PIECE = 8, 12
"""Characters of a secret in a row that are too many; of one written as a number, where addresses
and sizes of ours may hold shorter ones by chance."""
ALPHABETS = (
    string.hexdigits.lower()[:16],
    string.ascii_letters + string.digits,
    string.ascii_letters + string.digits + "+/=",
    string.ascii_letters + "@:/?#&=%[]{}\"'\\, é\n\x1b",
)
NAMES = (
    *("password", "passwd", "PASSWORD", "pass", "pwd", "secret", "client_secret", "token"),
    *("auth_token", "key", "hmac_key", "api_key", "apikey", "access-key", "sig", "credential"),
    *("credentials", "password_fil", "hmac_key_fil", "auth", "login", "user", "pin", "sas"),
    *("namespace_", "thread", "kv_role", "engine_id"),
)
"""Of keys that a user might think of; none of them is a setting that takes any text."""
FILES = ("password_file", "key_file", "hmac_key_file", "encryption_key_file")
TIER = {"url": "file:///nowhere/kv"}


def make_secret(seed: int, alphabet: str) -> str:
    return "".join(random.Random(seed).choices(alphabet, k=40))


secret_texts = st.builds(make_secret, st.integers(0, 1 << 64), st.sampled_from(ALPHABETS))
URLS: tuple[Callable[[str], str], ...] = tuple(
    form.format
    for form in (
        *("redis://user:{}@kv", "redis://:{}@kv:6379/0", "rediss://{}@kv/x", "redis://user:{}"),
        *("redis://:{}@k v", "redis:/:{}@kv", "user:{}@kv:6379", ":{}@kv", "//user:{}@kv/0"),
        *("unix://:{}@/run/v.sock", "unix:///run/v.sock?password={}", "unix://{}:{}@h/run"),
        *("s3://key:{}@bucket/kv", "s3://bucket/kv?X-Amz-Signature={}", "gs://bucket?token={}"),
        *("az://container/kv?sv=2024&sig={}", "file://user:{}@machine/mnt/kv", "file:///kv?k={}"),
        *("redis://kv?password={}", "redis://kv/0#{}", "http://user:{}@kv", "redis://kv key={}"),
        *("password={}", "url=redis://kv password={}", "redis://kv/0 {{'password': '{}'}}"),
    )
)


@st.composite
def urls(draw: st.DrawFn, secret: str) -> str:
    written = draw(st.sampled_from([secret, quote(secret), quote(secret, safe="")]))
    form = draw(st.sampled_from(URLS))
    return form(written, written)


def wrapped(draw: st.DrawFn, secret: str) -> Any:
    """A secret where text belongs, or in something of another type."""
    return draw(
        st.sampled_from(
            [
                *(secret, f"/{secret}", f"/run/{secret}", secret.encode(), [secret], (secret,)),
                *({"value": secret}, [{"password": secret}], {secret: 1}, f"file:///{secret}"),
                *(int.from_bytes(secret.encode(), "big"), Exception(secret)),
            ]
        )
    )


@st.composite
def tiers(draw: st.DrawFn, secret: str) -> Any:
    """What stands under "tiers", with a secret somewhere."""
    url = draw(urls(secret))
    value = wrapped(draw, secret)
    good = draw(st.sampled_from([f"redis://:{quote(secret, safe='')}@kv", "rediss://kv", "s3://b"]))
    tier: Any = draw(
        st.sampled_from(
            [
                *({"url": url}, {**TIER, draw(st.sampled_from(FILES)): value}),
                *({"url": good, draw(st.sampled_from(FILES)): value},),
                *({"url": good, draw(st.sampled_from(NAMES)): value}, {"password": secret}),
                *({"url": good, draw(st.sampled_from(TIER_KEYS[5:11])): {"password": secret}},),
                *({"url": good, "cert_file": "/c", "key_file": value}, {url: 1}, url, [url]),
                *({"url": "s3://b", "endpoint": draw(st.sampled_from(URLS[:2]))(secret, "")},),
                *({"url": "s3://b", "endpoint": f"https://m/?sig={secret}"},),
                *({"url": "s3://b", "endpoint": f"https://user:{secret}@m"},),
                *({"url": good}, {"url": secret.lstrip("/")}, {**TIER, "capacity": secret}, value),
            ]
        )
    )
    return draw(st.sampled_from([[tier], [tier, tier], [TIER, tier], tier, [tier, {**TIER}]]))


@st.composite
def extras(draw: st.DrawFn, secret: str) -> Any:
    """A whole `kv_connector_extra_config`, with a secret somewhere."""
    name, value = draw(st.sampled_from(NAMES)), wrapped(draw, secret)
    found = draw(tiers(secret))
    return draw(
        st.sampled_from(
            [
                *({"tiers": found}, {"tiers": found, "cpu_bytes_to_use": 1}, {name: value}),
                *({"tiers": value}, {"tires": found}, {"tiers": [TIER], name: value}),
                *({"kv_connector_extra_config": {"tiers": found}}, {"tiers": json_of(found)}),
                *(json_of({"tiers": found}), f"password={secret}", [found], secret.encode()),
                *(
                    {"cpu_bytes_to_use": found},
                    {"verify": secret},
                    {"disk_path": f"redis://:{secret}@kv"},
                ),
            ]
        )
    )


@st.composite
def transfer_configs(draw: st.DrawFn, secret: str) -> dict[str, Any]:
    """A whole `--kv-transfer-config`, with a secret somewhere."""
    extra = draw(extras(secret))
    connector = draw(st.sampled_from([CONNECTOR_NAME, "SafeCPUOffloadConector"]))
    ours = {"kv_connector": connector, "kv_connector_extra_config": extra}
    name, value = draw(st.sampled_from(NAMES)), wrapped(draw, secret)
    child = {"connectors": [{**ours, "kv_role": "kv_both"}]}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": child}
    return draw(
        st.sampled_from(
            [
                *(ours, {**ours, "tiers": draw(tiers(secret))}, {**ours, "cpu_bytes_to_use": "x"}),
                *({**ours, name: value}, {**multi, "kv_role": "kv_both"}),
                *({**ours, "tiers": [TIER]}, {**ours, "copy_threads": 1}),
            ]
        )
    )


def json_of(value: object) -> str:
    return json.dumps(value, default=str, skipkeys=True)


def pieces(text: str, length: int = PIECE) -> set[str]:
    return {text[start : start + length] for start in range(len(text) - length + 1)}


def check_hidden(secret: str, texts: str) -> None:
    """No form of a secret is in the texts, nor a piece of one."""
    utf8 = secret.encode()
    escaped = secret.encode("unicode_escape").decode()
    forms = {secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], escaped}
    forms |= {repr(secret)[1:-1], base64.b64encode(utf8).decode(), repr(utf8)[2:-1]}
    numbers = pieces(utf8.hex(), NUMBER_PIECE) | pieces(str(int.from_bytes(utf8)), NUMBER_PIECE)
    found = set.union(*map(pieces, forms)) & pieces(texts)
    found |= numbers & pieces(texts, NUMBER_PIECE)
    assert not found, f"{found} in: {texts}"


class Everything(logging.Handler):
    """Keeps what is logged, with tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logging.Formatter("%(message)s"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextmanager
def printed() -> Iterator[list[str]]:
    """All that is said inside: standard output, log lines, an error with what it comes from."""
    out, log = io.StringIO(), Everything()
    logger = logging.getLogger("vllm")
    said: list[str] = []
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    try:
        with redirect_stdout(out), redirect_stderr(out):
            yield said
    except (ValueError, SystemExit) as error:  # a ConfigError is a ValueError, as pydantic's are
        said += [*traceback.format_exception(error), repr(error)]
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
        said += [out.getvalue(), *log.lines]


def check_start(extra: Any, secret: str) -> None:
    """Read settings and open tiers as a start does; nothing that is said has the secret in it."""
    with printed() as said:
        config = OffloadConfig.from_extra_config(extra, world_size=1)
        said += [repr(config), str(config)]
        for tier_config in config.tiers:
            try:
                tier, _ = open_tier(tier_config, 4096, {})
            except ConfigError as error:
                said.extend(traceback.format_exception(error))
            else:
                said.extend([repr(tier), tier.label])
    check_hidden(secret, "\n".join(said))


@settings(max_examples=150)
@given(data=st.data(), secret=secret_texts)
def test_no_secret_in_the_settings_is_said_at_the_start(data, secret):
    check_start(data.draw(extras(secret)), secret)


@pytest.mark.parametrize("path", ["/{}", "/run/no-such-folder/{}", "/{}/{}"])
@pytest.mark.parametrize("url", ["file:///nowhere/kv", "redis://kv", "rediss://kv"])
def test_a_secret_in_the_place_of_its_path_is_not_said(url, path):
    secret = make_secret(3, ALPHABETS[2])
    written = path.format(secret, secret)
    check_start({"tiers": [{"url": url, "hmac_key_file": written}]}, secret)
    if url.startswith("rediss"):
        check_start({"tiers": [{"url": url, "cert_file": "/c", "key_file": written}]}, secret)


@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_a_secret_in_the_place_of_a_key_is_not_said(alphabet):
    secret = make_secret(4, alphabet)
    check_start({secret: 1}, secret)
    check_start({"tiers": [{**TIER, secret: 1}]}, secret)


@settings(max_examples=100)
@given(data=st.data(), secret=secret_texts)
def test_no_secret_in_a_whole_config_is_said_by_vllm(data, secret):
    """Errors of the class that reads `--kv-transfer-config`, which has pydantic's around ours."""
    from vllm.config import KVTransferConfig

    plugin.register()
    config = data.draw(transfer_configs(secret))
    with printed() as said:
        KVTransferConfig(**config)
    check_hidden(secret, "\n".join(said))


@settings(max_examples=100)
@given(data=st.data(), secret=secret_texts)
def test_no_secret_is_printed_by_the_commands(data, secret):
    text = json_of(data.draw(transfer_configs(secret)))
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, len(text)))]
    with printed() as said:
        main(["config", "--kv-transfer-config", text])
        main(["config", "--explain", "--kv-transfer-config", text])
    written = Written.read(text)
    findings = list(check_written(written))
    said += [render(findings), *(json.dumps(found.to_json()) for found in findings)]
    check_hidden(secret, "\n".join(said))


@settings(max_examples=60)
@given(data=st.data(), secret=secret_texts)
def test_no_secret_in_a_place_is_printed_by_the_cache(data, secret):
    place = data.draw(urls(secret))
    options = ["--hmac-key-file", secret] if data.draw(st.booleans()) else []
    with printed() as said:
        main(["cache", "verify", "file:///nowhere/kv", "--password-file", f"/{secret}"])
        main(["cache", "verify", place, *options])
    check_hidden(secret, "\n".join(said))


@pytest.mark.parametrize(
    "problem",
    [
        "unrecognized arguments: --api-ky {}",
        "unrecognized arguments: --api-ky={} {}",
        'Value {{"password": "{}"}} cannot be converted to <function loads>.',
        "argument --api-key: invalid value: '{}'",
    ],
)
def test_what_vllm_says_of_arguments_has_no_value_of_them(problem):
    secret = make_secret(7, ALPHABETS[1])
    facts = VllmFacts(arguments_problem=problem.format(secret, secret))
    check_hidden(secret, render(list(check_arguments(facts))))
