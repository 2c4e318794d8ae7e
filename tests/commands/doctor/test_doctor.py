"""`safe-offload doctor` on a sound machine, and on set-ups that are broken in one way each."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_models import write_tiny_model
from safe_offload.commands.cli import main, make_parser
from safe_offload.commands.doctor import command
from safe_offload.commands.doctor.configuration import Written
from safe_offload.commands.doctor.machine import Machine, read_machine
from safe_offload.commands.doctor.report import exit_status, render
from safe_offload.commands.doctor.vllm_facts import (
    PROBE,
    EngineConfigFacts,
    ModelFacts,
    VllmFacts,
    read_output,
)
from safe_offload.compat.versions import make_serve_parser
from safe_offload.config.units import GIB, MIB
from safe_offload.findings import Finding, Severity
from safe_offload.worker.memory.huge_pages import HugePages
from tests.fresh_process import run_script

NAME = "SafeCPUOffloadConnector"

ENGINE = EngineConfigFacts(
    prefix_caching=True,
    hash_algorithm="sha256",
    transfer_config={"kv_connector": NAME},
    num_ranks=2,
    num_local_ranks=2,
    other_offloading_gib=None,
)
MODEL = ModelFacts(
    block_bytes=2 * MIB,
    num_request_blocks=2048,
    max_model_len=32768,
    num_groups=1,
)
SOUND = VllmFacts(
    version="0.32.0",
    torch_version="2.13.0",
    connector="safe_offload.connector",
    engine=ENGINE,
    model_name="an-8b-model",
    model=MODEL,
)
MACHINE = Machine(
    available_bytes=64 * GIB,
    machine_available_bytes=64 * GIB,
    huge_pages=HugePages("madvise", is_given=True, fix=""),
)


class Answer:
    """A probe whose answer is known."""

    def __init__(self, facts: VllmFacts) -> None:
        self._facts = facts

    def facts(self) -> VllmFacts:
        return self._facts


@pytest.fixture
def examine(monkeypatch):
    """Examine facts; return what was found as it is printed."""

    def call(
        text: str = "",
        vllm: VllmFacts = SOUND,
        machine: Machine = MACHINE,
        cupy: tuple[str, ...] = (),
    ) -> list[Finding]:
        with monkeypatch.context() as patch:
            patch.setattr(command, "installed_cupy", lambda: dict.fromkeys(cupy, "14.2.0"))
            found = command.examine(Written.read(text), Answer(vllm), machine)
        print(render(found))
        return found

    return call


def ours(**settings: object) -> str:
    return json.dumps({"kv_connector": NAME, "kv_connector_extra_config": settings})


def wrong(found: list[Finding]) -> dict[str, Finding]:
    """What has to be changed, by id; each with what is expected and a fix."""
    problems = {f.id: f for f in found if f.severity in (Severity.ERROR, Severity.WARNING)}
    assert all(f.expected and f.fix for f in problems.values())
    assert exit_status(found) == bool(problems)
    return problems


def only(found: list[Finding]) -> Finding:
    problems = wrong(found)
    assert len(problems) == 1, problems
    return next(iter(problems.values()))


def with_engine(**changes: Any) -> VllmFacts:
    return dataclasses.replace(SOUND, engine=dataclasses.replace(ENGINE, **changes))


# ---- sound ------------------------------------------------------------------------------------


def test_on_a_sound_machine_there_is_nothing_to_change(examine):
    found = examine(ours(cpu_bytes_to_use="16GiB"))
    assert not wrong(found)
    assert render(found).endswith("\nNothing to change.")
    by_id = {one.id: one.found for one in found}
    assert "16.00 GiB for 2 ranks of 64.00 GiB" in by_id["memory.pool"]
    assert "about 131072 tokens, or 4.0 requests" in by_id["model.tokens"]


@pytest.fixture(scope="module")
def broken_process(tmp_path_factory):
    """The real command, started where vLLM is too new and may load no plugin."""
    folder = tmp_path_factory.mktemp("site")
    metadata = folder / "vllm-0.40.0+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.40.0+cpu\n")
    paths = [str(folder), str(Path(__file__).parents[3])]
    command_line = [sys.executable, "-m", "safe_offload", "doctor", "--json"]
    process = subprocess.Popen(
        command_line,
        env={**os.environ, "VLLM_PLUGINS": "mine", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def answers(tmp_path_factory, broken_process):
    """What a real vLLM makes of a model with three KV cache groups and of wrong arguments."""
    model = str(write_tiny_model("gemma3", tmp_path_factory.mktemp("model")))
    shared = ["--max-model-len", "4096", "--port", "8000", "--kv-transfer-config", ours()]
    arguments = [model, *shared, "--no-enable-prefix-caching", "-tp", "8"]
    script = f"from {PROBE} import main; main({arguments})"
    folder = tmp_path_factory.mktemp("probe")
    return read_output(run_script(script, folder, {"VLLM_LOGGING_LEVEL": "WARNING"}), "")


@pytest.mark.slow
def test_vllm_itself_tells_what_it_makes_of_the_arguments(answers):
    assert not answers.problem
    assert not answers.model_problem
    assert answers.connector == "safe_offload.connector"
    assert answers.engine.prefix_caching is False
    assert answers.engine.num_ranks == 8
    assert "must be divisible by tensor parallel size (8)" in answers.engine_problem
    assert (answers.model.num_groups, answers.model.max_model_len) == (3, 4096)
    # 3 groups of two layers; a block has keys and values of 2 heads of 32, 2 bytes each.
    assert answers.model.block_bytes % (2 * 2 * 2 * 32 * 2) == 0


@pytest.mark.slow
def test_the_command_finds_what_is_wrong_with_its_own_process(broken_process):
    """VLLM_PLUGINS and an unknown vLLM, for real."""
    output, _ = broken_process.communicate(timeout=900)
    assert broken_process.returncode == 1
    document = json.loads(output)
    found = {one["id"]: one for one in document["findings"]}
    assert found["configuration.plugin"]["severity"] == "error"
    assert "export VLLM_PLUGINS=mine,safe_offload" in found["configuration.plugin"]["fix"]
    assert found["versions.vllm"]["severity"] == "warning"
    assert "vLLM 0.40.0+cpu is not tested" in found["versions.vllm"]["found"]


# ---- broken -----------------------------------------------------------------------------------


ERROR, WARNING = Severity.ERROR, Severity.WARNING


def sound(**changes: Any) -> dict[str, VllmFacts]:
    return {"vllm": dataclasses.replace(SOUND, **changes)}


def engine(**changes: Any) -> dict[str, VllmFacts]:
    return {"vllm": with_engine(**changes)}


def machine(**changes: Any) -> dict[str, Machine]:
    return {"machine": dataclasses.replace(MACHINE, **changes)}


def config(**outer: str) -> dict[str, str]:
    return {"text": json.dumps({"kv_connector": NAME, **outer})}


def pool(**settings: object) -> dict[str, str]:
    return {"text": ours(**settings)}


@pytest.mark.parametrize(
    ("id", "severity", "said", "facts"),
    [
        ("settings", ERROR, 'write "cpu_bytes_to_use" if you', pool(cpu_bytes_to_uze="64GiB")),
        ("settings", ERROR, "", {"text": "{"}),
        ("settings", ERROR, "", config(kv_load_failure_policy="retry")),
        ("failure-policy", WARNING, "recompute", config(kv_load_failure_policy="fail")),
        ("prefix-caching", ERROR, "no-enable-prefix-caching", engine(prefix_caching=False)),
        ("hash", WARNING, "", engine(hash_algorithm="xxhash")),
        ("arguments", ERROR, "rejects its arguments: --x", sound(arguments_problem="--x")),
        ("plugin", ERROR, "", sound(connector="", connector_problem="Unsupported connector")),
        ("plugin", ERROR, "safe_offload", machine(environment={"VLLM_PLUGINS": ""})),
        ("plugin", ERROR, "=a,b,safe_offload", machine(environment={"VLLM_PLUGINS": "a,b"})),
        ("not-checked", WARNING, "AttributeError", machine(environment=None)),
        ("versions.vllm", WARNING, "0.31, 0.32, 0.33", sound(version="0.40.0")),
        (
            "versions.vllm",
            ERROR,
            "pip install 'vllm>=0.31,<0.34'",
            {"vllm": VllmFacts(torch_version="2.13.0", problem="No module named 'vllm'")},
        ),
        (
            "versions.cupy",
            WARNING,
            "pip install 'safe-offload[cuda13]'",
            sound(torch_cuda="13.0", num_gpus=1),
        ),
        (
            "versions.cupy",
            WARNING,
            "pip uninstall -y cupy-cuda12x && pip install 'safe-offload[cuda13]'",
            {"cupy": ("cupy-cuda12x",), **sound(torch_cuda="13.0", num_gpus=1)},
        ),
        ("model.facts", WARNING, "no such", sound(model=None, model_problem="no such repository")),
        ("model.tokens", WARNING, '_to_use": "4096MiB"', pool(cpu_bytes_to_use="1GiB")),
        ("model.tokens", WARNING, '_rank": "2048MiB"', pool(cpu_bytes_to_use_per_rank="1GiB")),
        ("model.tokens", WARNING, '"num_cpu_blocks": 2048', pool(num_cpu_blocks=100)),
        ("model.tokens", ERROR, '_to_use": "4096MiB"', pool(cpu_bytes_to_use="1MiB")),
        (
            "memory.huge-pages",
            WARNING,
            "echo madvise",
            machine(huge_pages=HugePages("never", is_given=False, fix="echo madvise")),
        ),
        (
            "memory.huge-pages",
            WARNING,
            "echo advise",
            {
                **machine(huge_pages_memfd=HugePages("never", is_given=False, fix="echo advise")),
                **sound(
                    engine=dataclasses.replace(ENGINE, num_ranks=2),
                    model=dataclasses.replace(MODEL, is_mla=True),
                ),
            },
        ),
        (
            "memory.pool",
            ERROR,
            "64.00 GiB (8 ranks on this machine",
            {**pool(cpu_bytes_to_use="16GiB"), **engine(num_local_ranks=8)},
        ),
    ],
)
def test_what_is_broken_in_one_way_is_found_with_its_fix(examine, id, severity, said, facts):
    problem = only(examine(**facts))
    assert problem.id == (id if "." in id else f"configuration.{id}")
    assert problem.severity is severity
    assert said in f"{problem.found}; {problem.expected}; {problem.fix}"


def test_the_size_of_the_flag_is_the_one_that_is_checked(examine):
    taken = {"kv_connector": NAME, "kv_connector_extra_config": {"cpu_bytes_to_use": 4096 * GIB}}
    text = ours(cpu_bytes_to_use="16GiB")
    found = examine(text, with_engine(other_offloading_gib=4096.0, transfer_config=taken))
    assert "4096.00 GiB" in only(found).found or "4.00 TiB" in only(found).found


@pytest.mark.parametrize(
    ("cuda", "cupy", "said"),
    [
        ("", (), "not installed; only a GPU needs it"),
        ("13.0", (), "torch is for CUDA 13.0; on a GPU: pip install 'safe-offload[cuda13]'"),
        ("13.0", ("cupy-cuda13x",), "cupy-cuda13x 14.2.0"),
    ],
)
def test_the_cupy_to_install_is_named_before_there_is_a_gpu(examine, cuda, cupy, said):
    found = examine(cupy=cupy, **sound(torch_cuda=cuda))
    (one,) = (each for each in found if each.id == "versions.cupy")
    assert one.severity in (Severity.OK, Severity.INFO)
    assert said in one.found


def test_a_list_of_plugins_may_have_us_in_it(examine):
    assert not wrong(examine(**machine(environment={"VLLM_PLUGINS": "a, safe_offload"})))


@pytest.mark.parametrize("version", [1, 2])
def test_a_small_cgroup(examine, tmp_path, version):
    root, proc = tmp_path / "cgroup", tmp_path / "proc"
    folder = root if version == 2 else root / "memory"
    folder.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemAvailable: 67108864 kB\n")
    (proc / "self/cgroup").write_text("0::/\n" if version == 2 else "4:memory:/\n")
    limit, usage = ("memory.max", "memory.current")
    if version == 1:
        limit, usage = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / limit).write_text(str(4 * GIB))
    (folder / usage).write_text(str(1 * GIB))
    read = read_machine(proc=proc, cgroup_root=root)
    names = ("available_bytes", "machine_available_bytes")
    found = wrong(examine(**machine(**{name: getattr(read, name) for name in names})))
    problem = found["memory.pool"]
    assert problem.severity is Severity.ERROR
    assert "3.00 GiB of host memory is available" in problem.found
    assert "the cgroup's limit" in problem.expected
    assert 'at most "2560MiB"' in problem.fix


# ---- more that can be wrong -------------------------------------------------------------------


TIERS = [{"url": "file:///mnt/nvme/kv"}]


def test_root_is_named_where_a_tier_is_in_a_network(examine):
    root = machine(is_root=True)
    server = ours(tiers=[{"url": "redis://127.0.0.1:1"}])
    assert "tiers.user" in wrong(examine(server, **root))
    assert "tiers.user" not in wrong(examine(server))
    assert not wrong(examine(ours(tiers=TIERS), **root))


def test_without_a_model_it_says_what_is_not_known(examine):
    found = examine(**sound(model_name="", model=None))
    assert not wrong(found)
    assert "no MODEL was given" in next(f.found for f in found if f.id == "model.facts")


@pytest.mark.parametrize(
    ("options", "status"), [([], 1), (["--fail-on", "warning"], 1), (["--fail-on", "error"], 0)]
)
def test_warnings_alone_may_pass(examine, monkeypatch, capsys, options, status):
    found = examine(config(kv_load_failure_policy="fail")["text"])
    assert only(found).severity is Severity.WARNING
    monkeypatch.setattr(command, "VllmProbe", lambda _: Answer(SOUND))
    monkeypatch.setattr(command, "examine", lambda *_: found)
    assert main(["doctor", *options]) == status
    assert "0 errors, 1 warning" in capsys.readouterr().out
    found.append(Finding("tiers.access", Severity.ERROR, "refused", "allowed", "allow it"))
    assert main(["doctor", *options]) == 1


def test_every_id_is_explained_and_no_other():
    root = Path(__file__).parents[3]
    themes = "configuration|versions|memory|model"
    sources = [path.read_text() for path in (root / "safe_offload/commands/doctor").glob("*.py")]
    used = set(re.findall(rf'"((?:{themes})\.[a-z-]+)"', "\n".join(sources)))
    page = (root / "docs/operate/doctor.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert set(re.findall(rf"`((?:{themes})\.[a-z-]+)`", rows)) == used


@pytest.mark.parametrize(
    "spelled",
    [
        ["--kv-transfer-config", ours(verify="load")],
        ["--kv_transfer_config", ours(verify="load")],
        [f"--kv_transfer-config={ours(verify='load')}"],
        ["--kv-transfer", ours(verify="load")],
        ["--kv_transfer_config.kv_connector", NAME],
        ["--kv_transfer_config.kv_connector_extra_config.verify=load"],
    ],
)
def test_the_connector_is_read_in_every_spelling_that_vllm_reads(spelled):
    """Nothing of ours stands beside it: the last one would win."""
    arguments = make_parser().parse_args(["doctor", "a_model", "--max_model_len=9", *spelled])
    rest = command.read_rest(arguments)
    handed = command.vllm_arguments(rest, Written.read(arguments.kv_transfer_config))
    read, meant = (
        make_serve_parser().parse_args(words)
        for words in (handed, ["a_model", "--max_model_len=9", *spelled])
    )
    read.kv_transfer_config.engine_id = meant.kv_transfer_config.engine_id  # drawn by vLLM
    assert read.kv_transfer_config == meant.kv_transfer_config
    assert (read.model_tag, read.max_model_len) == ("a_model", 9)
