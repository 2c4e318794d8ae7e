"""What may be printed of what others wrote; tests/config/test_secrets.py searches all messages."""

import pytest

from safe_offload.config.printing import (
    masked,
    printable,
    secret_file,
    without_arguments,
    without_secrets,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://kv:6379/1", "redis://kv:6379/1"),
        ("rediss://[::1]:7/3", "rediss://[::1]:7/3"),
        ("redis://me:a@b/c@kv", "redis://***@kv"),
        ("redis://me:hunter2", "redis://***"),
        ("redis://me:/hunter2", "redis://***"),
        ("redis://me%3Ahunter2%40kv", "redis://***"),
        ("redis://kv?password=a@b", "redis://***"),
        ("s3://bucket/kv?sig=x", "s3://bucket/kv***"),
        ("file:///mnt/my disk", "file:///mnt/my disk"),
        ("https://minio:9000", "https://minio:9000"),
        ("a=b redis://kv", "***"),
        ("me:hunter2@kv", "***"),
        ("password=x", "***"),
        ("-----BEGIN PRIVATE KEY-----", "***"),
        ("/mnt/kv", "/mnt/kv"),
        ("64 GiB", "64 GiB"),
        ("sample:1.5", "sample:1.5"),
    ],
)
def test_of_a_text_all_is_shown_but_logins_and_queries(text, expected):
    assert without_secrets(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("modèle 7", "modèle 7"),
        ("a\x1b[2J\n", r"a\x1b[2J\n"),
        ("\u202e\ud800", r"\u202e\ud800"),
        ("x" * 11, "x" * 10 + "..."),
    ],
)
def test_a_text_is_one_line_that_moves_no_cursor(text, expected):
    assert printable(text, 10 if text == "x" * 11 else 40) == expected


def test_settings_are_shown_without_secrets():
    tier = {"url": "redis://:x@kv", "hmac_key_file": "/k", "password_file": None, "keep": True}
    expected = {"url": "redis://***@kv", "hmac_key_file": "***", "password_file": None}
    assert masked([tier]) == [{**expected, "keep": True}]


def test_the_path_of_a_secret_is_shown_where_its_folder_is(tmp_path):
    assert secret_file(f"{tmp_path}/missing") == f"{tmp_path}/missing"
    assert secret_file(f"{tmp_path}/missing/key") == "***"
    assert secret_file("/9Tz6vKk1Qe0gXo4n8yB2sLh5uRw7aJ3m") == "***"


def test_of_arguments_that_vllm_refuses_the_options_are_left():
    problem = "unrecognized arguments: --api-ky hunter2 --x=hunter2 hunter2"
    assert without_arguments(problem) == "unrecognized arguments: --api-ky --x"
    assert without_arguments("no such model") == "no such model"
