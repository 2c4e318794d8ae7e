"""Checks of what the copies on trial have shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from safe_offload.commands.doctor.findings import Finding, error, info, ok, warning
from safe_offload.commands.doctor.memory import HostPool
from safe_offload.config.units import GIB, format_bytes

if TYPE_CHECKING:
    from safe_offload.commands.doctor.trial import Trial

NEEDED_BYTES: Final = GIB
"""Host memory that a trial takes, with room to spare."""


def check_room(available_bytes: int) -> Iterator[Finding]:
    """Say that copies cannot be tried, if so."""
    if available_bytes < NEEDED_BYTES:
        yield warning(
            "copies.self-test",
            f"{format_bytes(available_bytes)} of host memory is available, too little to try "
            "copies",
            f"{format_bytes(NEEDED_BYTES)}",
            "free memory on this machine, or raise the container's limit",
        )


def check_copies(trial: Trial) -> Iterator[Finding]:
    """Check that every way to copy is right, and say how fast it is."""
    where = f"on {trial.name}: "
    yield _compiled_loop(trial)
    yield from _self_test(trial, where)
    for path, num_torn in trial.torn.items():
        if num_torn:
            yield error(
                "copies.order",
                f'{where}copies by "{path}": in {num_torn} of {trial.rounds[path]} rounds a store '
                "got what was written to its block after the fence",
                "none",
                "do not use this machine for the connector; update the driver, and open an issue",
            )
    if trial.torn and not any(trial.torn.values()):
        rounds = ", ".join(f"{count} by {path}" for path, count in trial.rounds.items())
        yield ok("copies.order", f"{where}fenced overwrites: {rounds}; no store was torn")
    for path, gbps in trial.gbps.items():
        words = ", ".join(f"{traffic} {rate:.1f}" for traffic, rate in gbps.items())
        yield info("copies.rate", f"{where}by {path}, in GB/s: {words} (both directions together)")
    if problem := trial.failures.get("rates"):
        yield _failed("copies.rate", f"{where}{problem}")


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
    if problem := trial.failures.get("self-test"):
        yield error(
            id,
            f"{where}{problem}",
            "a self-test that runs",
            "look for a device that hangs or has memory errors (dmesg), and update its driver",
        )
    for path, problem in trial.problems.items():
        text = f'{where}copies by "{path}" are wrong or refused: {problem}'
        if trial.passed:
            yield warning(
                id,
                text,
                "every way to copy passes",
                f"nothing at once: {', '.join(trial.passed)} is used instead. To be sure, write "
                f'"copy_path": "{trial.passed[0]}", and open an issue with this line',
            )
        else:
            yield error(
                id,
                text,
                "a way to copy that passes; without one the connector never hits",
                "look for a device that hangs or has memory errors (dmesg, nvidia-smi -q -d ECC), "
                "and update its driver",
            )
    if trial.passed and not trial.problems:
        yield ok(id, f"{where}passed by {', '.join(trial.passed)}")


def check_ready(trial: Trial, pools: Sequence[HostPool]) -> Iterator[Finding]:
    """Say how long it takes until the whole pool of a rank can be used."""
    id = "memory.ready"
    where = f"on {trial.name}: "
    if problem := trial.failures.get("ready"):
        if trial.is_gpu:
            yield warning(
                id,
                f"{where}{problem}",
                "memory that the driver page-locks",
                "raise the limit for locked memory (ulimit -l unlimited; docker run --ulimit "
                "memlock=-1), or give a smaller pool",
            )
        else:
            yield _failed(id, f"{where}{problem}")
        return
    verb = "page-locked" if trial.is_gpu else "touched"
    rate = f"{where}memory is {verb} at {trial.ready_bytes_per_s / 1e9:.1f} GB/s ({trial.pages})"
    for pool in pools:
        if pool.rank_bytes is None:
            yield info(id, rate)
            continue
        seconds = pool.rank_bytes / trial.ready_bytes_per_s
        size = format_bytes(pool.rank_bytes)
        yield info(id, f"{rate}, so {size} takes about {seconds:.1f} s, while the server runs")


def _failed(id: str, problem: str) -> Finding:
    return warning(id, f"not measured: {problem}", "a measurement", "open an issue with this line")
