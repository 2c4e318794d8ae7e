"""The self-test: proves that copies are correct on this machine, before vLLM serves.

Each copy path is tried on the real memory: patterns are copied from blocks to slots and back,
adjacent and scattered ones, and a fenced overwrite follows a store. Every byte is compared, also
around the copies, and the blocks get their contents back. A path that fails is not used. If copies
choose between two paths, both are timed on the blocks of this model: at the start, and again when
the engine has started and is idle, as other processes may have slowed down the bus or the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from safe_offload.errors import SafeOffloadError, TransferError
from safe_offload.layout import HostLayout
from safe_offload.protocol import FailureReason, Transfer, ids_of
from safe_offload.worker.copies.base import Copy, CopyPath, Direction, ProvableBackend, TimedCopy
from safe_offload.worker.copies.rows import Bytes, Rows
from safe_offload.worker.transfers import Transfers

logger = logging.getLogger(f"vllm.{__name__}")

TIMEOUT_S = 30.0  # a device that has not copied a few blocks by then hangs
STEP_TIMEOUT_S = 5.0  # a step that has not ended by then hangs in the driver
POLL_S = 0.0002
PAIRS_MAX = 8
PATTERN_BYTES = 16 << 20  # about what one pattern has at most; two blocks at least
TIMED_RANGES = 1024  # about what a timed copy has at most; one block at least
TIMED_ROUNDS = 3  # of which the shortest counts: others share the machine
TIMING_S = 0.3  # after so long no other copy is timed, and the times are dropped
IDLE_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # before each further timing: others may go on
FASTER = 0.9  # of the time before, to be logged
STORES_BEFORE_FENCE = 4  # keep the device busy, so that an overwrite without a fence comes first


class GivenUpError(SafeOffloadError):
    """The test has been given up: blocks and slots belong to vLLM now."""


class SelfTest:
    """Tries every copy path of a backend, on its own thread; `problems` are of those that failed.

    Only that thread changes its state, blocks and slots, in steps. It takes no further step once
    the test has been given up. No transfers are in flight; `host` is the memory, as uint8.
    """

    def __init__(
        self,
        transfers: Transfers,
        backend: ProvableBackend,
        rows: Rows,
        host: Bytes,
        layout: HostLayout,
    ) -> None:
        self._transfers = transfers
        self._backend = backend
        self._rows = rows
        self._host = host
        self._layout = layout
        self._random = np.random.PCG64(0)
        self._last_id = 0
        self._in_step = threading.Lock()
        self._is_given_up = False
        self._has_run = False
        self._sound: list[CopyPath] = []
        self._timed: list[TimedCopy] = []
        self.problems: dict[CopyPath, str] = {}

    def run(self, timeout_s: float = TIMEOUT_S, slots: range | None = None) -> bool:
        """Let the backend use the paths that pass; return False if there is none.

        Only `slots` may be written; None for all that are ready.
        """
        self._slots_allowed = range(self._backend.num_usable_slots) if slots is None else slots
        if not self._slots_allowed:
            logger.error(
                "No host memory was ready in time for the self-test. Offloading is off until the "
                "server is restarted; vLLM serves without host hits. Fix: check for a hung device "
                'or machine (dmesg, nvidia-smi, vmstat), lower "cpu_bytes_to_use", and restart.'
            )
            return False
        start_s = time.monotonic()
        self._deadline_s = start_s + timeout_s
        # A thread of its own: it may hang with the device, and what it allocates on a GPU must not
        # come from the pool that vLLM takes the KV cache from, which is gone while it sleeps.
        thread = threading.Thread(target=self._try_all, name="safe-offload-self-test", daemon=True)
        thread.start()
        thread.join(timeout_s + 1.0)
        if thread.is_alive():
            self.give_up()
            self._sound = []
        elapsed_s = time.monotonic() - start_s
        for path, problem in self.problems.items():
            logger.error(
                'Copy path "%s" failed the self-test and is not used. %s', path.value, problem
            )
        if not self._sound:
            logger.error(
                "No copy path passed the self-test within %.0f s. Offloading is off until the "
                "server is restarted; vLLM serves without host hits. Fix: check for a device that "
                "hangs or has memory errors (dmesg, nvidia-smi -q -d ECC), update the driver, or "
                'try another "copy_path", and open an issue with this log.',
                timeout_s,
            )
            return False
        self._backend.use(tuple(self._sound), self._timed)
        self._has_run = True
        logger.info(
            "The self-test of the copies took %.2f s. Passed: %s.",
            elapsed_s,
            ", ".join(path.value for path in self._sound),
        )
        if self._timed:
            logger.info("Measured copies of scattered blocks: %s.", ", ".join(self._rates()))
        return True

    def time_again(self) -> None:
        """Repeat the timing while the engine is idle; the shortest time of each copy counts.

        GivenUpError: a step is about to run.
        """
        before = self._timed
        self._deadline_s = time.monotonic() + TIMEOUT_S
        try:
            with self._backend.undisturbed():
                self._time_choices()
            if before:
                pairs = zip(before, self._timed, strict=True)
                self._timed = [min(pair, key=lambda timed: timed.seconds) for pair in pairs]
        finally:
            self._backend.use(tuple(self._sound), self._timed)
        times = zip(self._timed, before, strict=False)
        if any(new.seconds < FASTER * old.seconds for new, old in times):
            rates = ", ".join(self._rates())
            logger.info("Measured copies of scattered blocks again while idle: %s.", rates)

    def give_up(self) -> None:
        """Let the test's thread end after its present step, and wait for that."""
        has_ended = self._in_step.acquire(timeout=STEP_TIMEOUT_S)
        self._is_given_up = True
        if has_ended:
            self._in_step.release()

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Enter a step, for which `give_up` waits; raise GivenUpError after it."""
        with self._in_step:
            if self._is_given_up:
                raise GivenUpError
            yield

    def _try_all(self) -> None:
        try:
            self._choose()
            self._rows.bind_thread()
            self._try_each()
            self._time_choices()
        except GivenUpError:
            pass  # `run` has logged it
        except Exception:
            logger.exception("The self-test of the copies ended with an error")
            self._sound = []

    def _try_each(self) -> None:
        before = self._rows.read(self._watched_blocks)
        for path in self._backend.paths:
            with self._step():
                self._backend.use((path,))
            problem = self._problem()
            with self._step():
                if problem is None:
                    self._sound.append(path)
                else:
                    self.problems[path] = problem
                if time.monotonic() > self._deadline_s:
                    # A copy may still be in flight, and the others would wait behind it.
                    self._sound = []
                    return
        self._write_blocks(self._watched_blocks, before)
        self._rows.read(self._watched_blocks[:1])  # and wait for it

    def _time_choices(self) -> None:
        """Time the paths among which copies choose; the times count only if all are measured."""
        if not self._sound:
            return
        with self._step():
            self._backend.use(tuple(self._sound))
        timed: list[TimedCopy] = []
        end_s = min(time.monotonic() + TIMING_S, self._deadline_s)
        try:
            for path in self._backend.choices:
                with self._step():
                    self._backend.use((path,))
                for blocks, slots in self._timed_pairs():
                    # A load brings what the store before it took, so the blocks stay as they are.
                    for direction in (Direction.STORE, Direction.LOAD):
                        timed.append(self._time(path, direction, blocks, slots, end_s))
            self._timed = timed
        except GivenUpError:
            raise
        except Exception as error:
            level = logging.DEBUG if self._has_run else logging.INFO
            logger.log(level, "Copy paths are chosen without timing: %s", error)
            if time.monotonic() > self._deadline_s:
                self._sound = []  # a copy may still be in flight, in blocks that vLLM uses soon

    def _time(
        self,
        path: CopyPath,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        end_s: float,
    ) -> TimedCopy:
        seconds = []
        for _ in range(TIMED_ROUNDS):
            if time.monotonic() > end_s:
                raise TransferError(FailureReason.TIMED_OUT, f"no result within {TIMING_S:g} s")
            self._wait([self._submit(direction, blocks, slots)])
            copied = self._transfers.take_copied()[-1]
            seconds.append(copied.queued_s + copied.copying_s)
        ids = (np.array(numbers, dtype=np.int64) for numbers in (blocks, slots))
        return TimedCopy(path, Copy(direction, *ids), min(seconds))

    def _timed_pairs(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield blocks and slots of copies: one block, scattered blocks, adjacent blocks."""
        num_blocks, allowed = self._layout.geometry.num_blocks, self._slots_allowed
        num_segments = len(self._layout.geometry.segments)
        wanted = min(TIMED_RANGES // num_segments, PATTERN_BYTES // self._backend.slot_bytes)
        scattered = range(num_blocks - 1, 0, -2), allowed[::-2]
        count = min(max(2, wanted), *map(len, scattered))
        if count > 1:
            yield scattered[0][:1], scattered[1][:1]
            yield scattered[0][:count], scattered[1][:count]
            yield range(num_blocks - count, num_blocks), allowed[:count]

    def bind_thread(self) -> None:
        """Let the calling thread use the device."""
        self._rows.bind_thread()

    @property
    def store_bytes_per_s(self) -> float | None:
        """The rate of stores of several blocks on the slowest path; None if not measured."""
        return min(
            (
                len(timed.copy.block_ids) * self._backend.slot_bytes / timed.seconds
                for timed in self._timed
                if timed.copy.direction is Direction.STORE and len(timed.copy.block_ids) > 1
            ),
            default=None,
        )

    def _rates(self) -> Iterator[str]:
        """Yield the rate of copies of scattered blocks, by direction and path."""
        for direction, path in itertools.product(Direction, self._sound):
            ours = [t for t in self._timed if (t.copy.direction, t.path) == (direction, path)]
            if ours:
                # The scattered blocks come before as many neighbours.
                most = max(ours, key=lambda timed: len(timed.copy.block_ids))
                gbps = len(most.copy.block_ids) * self._backend.slot_bytes / most.seconds / 1e9
                yield f"{direction.value} by {path.value} {gbps:.1f} GB/s"

    def _problem(self) -> str | None:
        try:
            self._try()
        except GivenUpError:
            raise
        except Exception as error:
            return str(error)
        return None

    def _choose(self) -> None:
        """Choose blocks and slots: adjacent ones first, then scattered ones."""
        num_blocks, allowed = self._layout.geometry.num_blocks, self._slots_allowed
        num_pairs = max(2, min(PAIRS_MAX, PATTERN_BYTES // self._backend.slot_bytes))
        blocks = _spread(num_blocks, num_pairs)
        slots = [allowed[index] for index in _spread(len(allowed), num_pairs)]
        count = min(len(blocks), len(slots))
        self._blocks, self._slots = blocks[:count], slots[:count]
        self._watched_blocks = _with_neighbours(self._blocks, range(num_blocks))
        self._watched_slots = _with_neighbours(self._slots, allowed)
        # Which rows of a pattern for all that is watched are those that are copied.
        self._block_rows = [self._watched_blocks.index(block) for block in self._blocks]
        self._slot_rows = [self._watched_slots.index(slot) for slot in self._slots]

    def _try(self) -> None:
        """Try the path in use; raise TransferError if a byte is wrong or a copy failed."""
        blocks, slots = self._noise(self._watched_blocks), self._noise(self._watched_slots)
        self._write_blocks(self._watched_blocks, blocks)
        self._write_slots(slots)
        self._wait([self._submit(Direction.STORE)])
        slots[self._slot_rows] = blocks[self._block_rows]
        self._compare("store", slots, self._read_slots())

        blocks = self._noise(self._watched_blocks)
        self._write_blocks(self._watched_blocks, blocks)
        self._wait([self._submit(Direction.LOAD)])
        blocks[self._block_rows] = slots[self._slot_rows]
        self._compare("load", blocks, self._rows.read(self._watched_blocks))

        stored = blocks[self._block_rows]
        overwrite = self._rows.prepare(self._blocks, self._noise(self._blocks))
        self._write_slots(self._noise(self._watched_slots))
        ids = [self._submit(Direction.STORE) for _ in range(STORES_BEFORE_FENCE)]
        self._transfers.fence(tuple(ids))
        with self._step():
            overwrite()
        self._wait(ids)
        self._compare("fenced store", stored, self._read_slots()[self._slot_rows])

    def _noise(self, ids: Sequence[int]) -> Bytes:
        """Return fresh random bytes; shape (n, slot_bytes)."""
        size_bytes = len(ids) * self._backend.slot_bytes
        words = self._random.random_raw(-(-size_bytes // 8))
        return words.view(np.uint8)[:size_bytes].reshape(len(ids), -1)

    def _submit(
        self,
        direction: Direction,
        blocks: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
    ) -> int:
        self._last_id -= 1  # the scheduler side counts up from zero
        pairs = ids_of(blocks or self._blocks), ids_of(slots or self._slots)
        with self._step():
            self._transfers.submit(direction, Transfer(self._last_id, *pairs))
        return self._last_id

    def _wait(self, transfer_ids: Sequence[int]) -> None:
        left = set(transfer_ids)
        while left:
            for transfer_id, failure in self._transfers.drain():
                left.discard(transfer_id)
                if failure is not None:
                    raise TransferError(failure, "the copy failed; see the log")
            if time.monotonic() > self._deadline_s:
                raise TransferError(FailureReason.TIMED_OUT, "the copy did not end")
            time.sleep(POLL_S)

    def _views(self) -> list[list[Bytes]]:
        ranges = map(self._layout.ranges_of, self._watched_slots)
        return [[self._host[at : at + length] for at, length in parts] for parts in ranges]

    def _read_slots(self) -> Bytes:
        return np.stack([np.concatenate(parts) for parts in self._views()])

    def _write_slots(self, content: Bytes) -> None:
        with self._step():
            for parts, row in zip(self._views(), content, strict=True):
                ends = np.cumsum([len(part) for part in parts])
                for part, piece in zip(parts, np.split(row, ends[:-1]), strict=True):
                    part[:] = piece

    def _write_blocks(self, block_ids: Sequence[int], content: Bytes) -> None:
        write = self._rows.prepare(block_ids, content)
        with self._step():
            write()

    def _compare(self, what: str, expected: Bytes, found: Bytes) -> None:
        num_wrong = int(np.count_nonzero(expected != found))
        if num_wrong:
            raise TransferError(
                FailureReason.COPY_FAILED, f"{what}: {num_wrong} of {expected.size} bytes are wrong"
            )


class IdleTiming:
    """Repeats the timing of copy paths of a passed test, on its own thread, until the first step.

    Until then, blocks and slots are empty: the timing copies blocks to slots and back.
    """

    def __init__(self, test: SelfTest) -> None:
        self._test = test
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start, once the engine has started; a second call does nothing."""
        if self._thread is None:
            name = "safe-offload-idle-timing"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def stop(self) -> bool:
        """Stop within a copy of some MiB, before a step runs; return False if a copy hangs."""
        if self._thread is None:
            return True
        self._stopping.set()
        self._test.give_up()
        self._thread.join(STEP_TIMEOUT_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._test.bind_thread()
        for pause_s in IDLE_PAUSES_S:
            if self._stopping.wait(pause_s):
                return
            try:
                self._test.time_again()
            except GivenUpError:
                return
            except Exception:
                logger.exception("Timing the copies again failed")
                return


def _spread(count: int, num_wanted: int) -> list[int]:
    """Return adjacent ids, then single ids from the end, of those below `count`.

    Block 0 is omitted if there are enough others: it is vLLM's null block.
    """
    first = min(1, count - 1)
    run = list(range(first, count))[: (num_wanted + 1) // 2]
    single = list(range(count - 1, run[-1] + 1, -2))
    return (run + single)[:num_wanted]


def _with_neighbours(ids: Sequence[int], allowed: range) -> list[int]:
    """Return ids and their neighbours, sorted."""
    return sorted({i for j in ids for i in (j - 1, j, j + 1) if i in allowed})
