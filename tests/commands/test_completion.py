"""Scripts for shells, each tried in that shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from safe_offload.commands.cli import main

ASK = {
    "bash": """
source {script}
COMP_WORDS=({words} {last!r}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=()
_safe_offload
printf '%s\\n' "${{COMPREPLY[@]}}"
""",
    "fish": """
source {script}
complete -C{line!r} | string replace -r '\\t.*' ''; true
""",
    # Completion works at the prompt only, so one is opened.
    "zsh": """
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PS1=; autoload -Uz compinit; compinit -u -D; zstyle ":completion:*" list-prompt ""'
zpty -w z 'LISTMAX=1000; setopt no_beep; source {script}; echo REA""DY'
zpty -r z out '*READY*'
zpty -n -w z {line!r}$'\\t\\t'
zpty -r -m z out '*{until}*'
print -r -- "$out"
""",
}


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """Return the script for a shell."""

    def write(shell: str) -> Path:
        path = tmp_path_factory.mktemp("completion") / f"script.{shell}"
        command = [sys.executable, "-m", "safe_offload", "completion", shell]
        path.write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return path

    return write


def candidates(shell: str, script: Path, line: str, until: str = "") -> list[str]:
    """Return what a shell offers for a line that ends with TAB."""
    words, _, last = line.rpartition(" ")
    text = ASK[shell].format(script=script, words=words, last=last, line=line, until=until)
    done = subprocess.run(
        [shell, "-c", text], capture_output=True, text=True, check=True, cwd=script.parent
    )
    return done.stdout.split()


PRUNE = {"--to", "--older-than", "--dry-run", "--json", "--password-file", "--hmac-key-file"}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_offers_commands_options_values_and_files(shell, script):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = script(shell)

    def offered(line: str) -> list[str]:
        return candidates(shell, path, line)

    assert offered("safe-offload ca") == ["cache"]
    assert {"config", "doctor", "cache", "top", "bench", "completion"} <= set(
        offered("safe-offload ")
    )
    assert set(offered("safe-offload cache ")) == {"ls", "verify", "prune", "rm"}
    assert set(offered("safe-offload cache prune --")) >= PRUNE
    assert "--all" not in offered("safe-offload cache prune --")
    assert offered("safe-offload cache prune /mnt/kv --ol") == ["--older-than"]
    assert offered("safe-offload completion b") == ["bash"]
    assert offered("safe-offload bench eng") == ["engine"]
    assert not offered("safe-offload cache prune --to xyz")


def test_zsh_offers_the_same(script):
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    path = script("zsh")
    offered = candidates("zsh", path, "safe-offload cache prune --older", until="--older-than")
    assert any("--older-than" in word for word in offered)


def test_tab_completes_at_the_prompt_of_bash(script):
    path, (ours, theirs) = script("bash"), os.openpty()
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "dumb", "INPUTRC": "/dev/null"},
    )

    def type_until(typed: str, shown: str) -> None:
        os.write(ours, typed.encode())
        text = ""
        while shown not in text:
            text += os.read(ours, 4096).decode()

    try:
        type_until(f"source {path}; PS1=; echo REA''DY\n", "READY")
        type_until("safe-offload ca\t", "cache ")
        type_until("pr\t", "prune ")
        type_until("--ol\t", "--older-than ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
        os.close(theirs)


def test_values_of_an_option_are_offered_after_it(monkeypatch, capsys, tmp_path):
    from safe_offload.commands import cli, top

    before = top.add_arguments

    def add(parser):
        before(parser)
        parser.add_argument("--style", choices=["plain", "fancy"], help="it's 100%% %(default)s")

    monkeypatch.setattr(top, "add_arguments", add)
    for shell in ("bash", "fish"):
        assert main(["completion", shell]) == 0
        path = tmp_path / shell
        path.write_text(capsys.readouterr().out)
        if shutil.which(shell):
            found = candidates(shell, path, "safe-offload top --style ")
            assert sorted(found) == ["fancy", "plain"]
    assert r"it\'s 100% None" in path.read_text()
    assert cli.make_parser()
