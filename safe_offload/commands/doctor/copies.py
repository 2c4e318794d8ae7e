"""Judges the trials of the copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from safe_offload.findings import Finding, error, info, ok, warning

if TYPE_CHECKING:
    from safe_offload.commands.doctor.trial import Trial


def check_copies(trial: Trial) -> Iterator[Finding]:
    """Check that every copy path is correct."""
    where = f"on {trial.name}: "
    yield _compiled_loop(trial)
    yield from _self_test(trial, where)
    if trial.is_pageable:
        yield warning(
            "memory.memlock",
            f"{where}the driver does not page-lock host memory, which slows copies",
            "page-locked host memory",
            "raise the limit for locked memory (ulimit -l unlimited; docker run --ulimit "
            "memlock=-1), or lower the pool size",
        )


def _compiled_loop(trial: Trial) -> Finding:
    id = "copies.compiled-loop"
    if trial.has_compiled_loop:
        return ok(id, "the loop that copies small blocks is compiled")
    if trial.is_gpu:
        return info(id, "the loop of the CPU backend is not compiled; a GPU does not need it")
    return warning(
        id,
        "the loop that copies small blocks was not compiled: an interpreted one is slower and "
        "delays the engine",
        "a C compiler where safe-offload is installed",
        "install one (Debian: apt-get install gcc), then "
        "pip install --force-reinstall --no-deps --no-binary :all: safe-offload",
    )


def _self_test(trial: Trial, where: str) -> Iterator[Finding]:
    id = "copies.self-test"
    if trial.failure:
        yield error(
            id,
            f"{where}{trial.failure}",
            "a working self-test",
            "check for a device that hangs or has memory errors (dmesg), and update its driver",
        )
    for path, problem in trial.problems.items():
        text = f'{where}copy path "{path}" fails or corrupts bytes: {problem}'
        if trial.passed:
            yield warning(
                id,
                text,
                "every copy path passes",
                f"nothing urgent: {', '.join(trial.passed)} is used instead. To make sure, write "
                f'"copy_path": "{trial.passed[0]}", and open an issue with this line',
            )
        else:
            yield error(
                id,
                text,
                "a copy path that passes; without one, the connector never hits",
                "check for a device that hangs or has memory errors (dmesg, nvidia-smi -q -d "
                "ECC), and update its driver",
            )
    if trial.passed and not trial.problems:
        yield ok(id, f"{where}passed by {', '.join(trial.passed)}")
