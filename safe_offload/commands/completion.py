"""Completion of commands and options with TAB: print a script for a shell.

bash: safe-offload completion bash > ~/.safe-offload.bash  # sourced by ~/.bashrc
zsh:  safe-offload completion zsh > ~/.safe-offload.zsh    # sourced by ~/.zshrc after compinit
fish: safe-offload completion fish > ~/.config/fish/completions/safe-offload.fish
"""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from shlex import quote

from safe_offload.commands import cli

_BASH = """\
_safe_offload() {{
    local at="" word words="" cur="${{COMP_WORDS[COMP_CWORD]}}" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        case "$at/$word" in
            {paths}) at="$at/$word" ;;
        esac
    done
    case "$at ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
        *) case "$at" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _safe_offload safe-offload
"""
_ZSH = """\
autoload -Uz bashcompinit && bashcompinit
"""
_FISH = """\
function __safe_offload_at
    set -l at .
    for word in (commandline -opc)[2..]
        switch "$at/$word"
            case {paths}
                set at "$at/$word"
        end
    end
    test $at = $argv[1]
end
"""


@dataclass(frozen=True, slots=True)
class Command:
    """What may follow a command.

    Attributes:
        path: from the root: "/cache/ls"; empty for the root.
        words: subcommands, or what an argument without a name may be, with their help.
    """

    path: str
    words: list[tuple[str, str]]
    options: list[argparse.Action]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=list(_SHELLS), help="shell to complete in")


def run_command(arguments: Namespace) -> int:
    """Print the script; return the exit status."""
    sys.stdout.write(_SHELLS[arguments.shell](list(_commands(cli.make_parser()))))
    return 0


def _commands(parser: ArgumentParser, path: str = "") -> Iterator[Command]:
    """Yield a command, and all below it."""
    with suppress(ImportError):  # of what the command needs: its options are not offered then
        if isinstance(parser, cli.Subcommand):
            parser.load()
    command = Command(path, [], [])
    below: list[tuple[str, ArgumentParser]] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            command.words.extend((each.dest, each.help or "") for each in action._choices_actions)
            below += action.choices.items()
        elif action.option_strings:
            command.options.append(action)
        else:
            command.words.extend((str(choice), "") for choice in action.choices or ())
    yield command
    for name, each in below:
        yield from _commands(each, f"{path}/{name}")


def _values_of(option: argparse.Action) -> list[str] | None:
    """Return what may follow an option: anything if it is empty; None if nothing does."""
    return None if option.nargs == 0 else list(map(str, option.choices or ()))


def _bash(commands: list[Command]) -> str:
    values, words = [], []
    for command in commands:
        names = [name for option in command.options for name in option.option_strings]
        after: dict[str, list[str]] = {}
        for option in command.options:
            if (found := _values_of(option)) is not None:
                after.setdefault(" ".join(found), []).extend(option.option_strings)
        for found_words, options in after.items():
            pattern = "|".join(quote(f"{command.path} {name}") for name in options)
            values.append(f"        {pattern}) words={quote(found_words)} ;;")
        shown = " ".join(word for word, _ in command.words)
        words.append(
            f"            {quote(command.path)}) [[ $cur == -* ]] && words={quote(' '.join(names))}"
            f" || words={quote(shown)} ;;"
        )
    paths = "|".join(command.path for command in commands if command.path)
    return _BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def _zsh(commands: list[Command]) -> str:
    return _ZSH + _bash(commands)


def _fish(commands: list[Command]) -> str:
    paths = " ".join(f".{command.path}" for command in commands if command.path)
    lines = []
    for command in commands:
        begin = f"complete -c safe-offload -n '__safe_offload_at .{command.path}'"
        lines += [f"{begin} -f -a {word} -d {_fish_quote(what)}" for word, what in command.words]
        for option in command.options:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.option_strings
            )
            found = _values_of(option)
            more = "" if found is None else f" -r -f -a {_fish_quote(' '.join(found))}"
            if found == []:
                more = " -r -F"
            lines.append(f"{begin} {names}{more} -d {_fish_quote(_help_of(option))}")
    return _FISH.format(paths=paths) + "\n".join(lines) + "\n"


def _help_of(option: argparse.Action) -> str:
    """Return the help of an option with its default in place."""
    return (option.help or "").replace("%(default)s", str(option.default)).replace("%%", "%")


def _fish_quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
