"""The command reads its arguments, and says what is wrong with them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import safe_offload
from safe_offload.commands.cli import main

HEAVY = {"torch", "vllm", "numpy", "triton", "matplotlib"}


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_import_nothing_heavy_and_print_nothing_else(argument):
    """torch and vLLM take seconds to import, and print lines of their own."""
    script = """
import atexit, json, sys
from safe_offload.commands.cli import main
atexit.register(lambda: print(json.dumps(sorted(name for name in sys.modules if "." not in name))))
main(sys.argv[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, argument],
        cwd=Path(safe_offload.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *printed, modules = done.stdout.splitlines()
    assert not HEAVY & set(json.loads(modules))
    expected = f"safe-offload {safe_offload.__version__}"
    assert printed == [expected] if argument == "--version" else "bench" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["bench", "--help"], "engine"), (["bench", "engine", "--help"], "--prompt-tokens")],
)
def test_help_names_subcommands_and_options(arguments, word, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert word in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: expected at least 1"),
        (["--kv-transfer-config", "{}", "--rounds", "1"], "kv_connector"),
    ],
)
def test_what_cannot_be_measured_is_an_error(arguments, message, capsys):
    assert main(["bench", "engine", "--model", "some/model", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_requests_to_a_bucket_that_are_still_answered_do_not_abort_the_command(bucket_server):
    """They are answered while Python's finalization deletes what sleeps when it is deleted."""
    script = f"""
import asyncio, time
from safe_offload import __main__
from safe_offload.config.tiers import TierConfig
from safe_offload.tiers.objects.bucket import open_store

class Sleeps:
    def __del__(self, sleep=time.sleep):
        sleep(2)

async def begin():
    for number in range(64):
        running.add(asyncio.ensure_future(store.put_async(str(number), bytes(4096))))
    await asyncio.sleep(0)

def main():
    asyncio.new_event_loop().run_until_complete(begin())
    print("begun")
    return 130

store = open_store(TierConfig.at({bucket_server.url("cli")!r}, endpoint={bucket_server.endpoint!r}))
running, sleeps, __main__.main = set(), Sleeps(), main
__main__.program()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "")
