"""The breakages: what is taken out, which promise then breaks, where the simulator looks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One line of our code, changed.

    Attributes:
        name: what is broken, in words.
        file: below `safe_offload/`.
        old: occurs once in the file.
        new: stands in its place.
        promise: the checker that must catch it (docs/guarantees.md).
        profiles: of the simulator, tried in turn.
    """

    name: str
    file: str
    old: str
    new: str
    promise: str
    profiles: tuple[str, ...]


_LOADS, _STORES = "scheduler/loads.py", "scheduler/stores.py"
_PLANNER, _REQUESTS = "scheduler/planner.py", "scheduler/requests.py"

MUTANTS = (
    # ---- I1: a reported hit stays ----
    Mutant(
        "no lease at match",
        _LOADS,
        "self._leases.lease(LeaseKind.MATCH, hit.slots())",
        "self._leases.lease(LeaseKind.MATCH)",
        "I1",
        ("host-pressure",),
    ),
    Mutant(
        "no lease on a load",
        _LOADS,
        "lease = self._leases.lease(LeaseKind.LOAD, [slot for _, slot in pairs])",
        "lease = self._leases.lease(LeaseKind.LOAD)",
        "I1",
        ("host-pressure",),
    ),
    Mutant(
        "a load's lease ends when it is planned",
        _LOADS,
        "        self._new = []\n        failures, ",
        "        [load.lease.release() for load in self._new]\n"
        "        self._new = []\n        failures, ",
        "I1",
        ("host-pressure",),
    ),
    # ---- I2: no reference on a GPU block ----
    Mutant(
        "a finished request's block is referenced until its store is done",
        _PLANNER,
        "            if not self._is_disabled:\n                self._stores.add_finished(state)\n",
        "            for b in self._gpu.of_request(request.request_id, 0): b.ref_cnt += 1\n",
        "I2",
        ("plain",),
    ),
    Mutant(
        "request_finished keeps the blocks",
        "connector.py",
        "            self._planner.finish(request)\n        return False, None",
        "            self._planner.finish(request)\n        return True, None",
        "I2",
        ("plain",),
    ),
    # ---- I3: told once, and only of what vLLM owns ----
    Mutant(
        "a load is complete after the first rank",
        _PLANNER,
        "            transfer.failed |= failed\n",
        "            transfer.failed |= failed\n            transfer.ranks_left.clear()\n",
        "I3",
        ("tensor-parallel", "pipeline"),
    ),
    Mutant(
        "ids are not filtered",
        _PLANNER,
        "            self._book.filter(output, self._gpu)",
        "            pass",
        "I3",
        ("foreign-ids",),
    ),
    Mutant(
        "ids of requests that do not wait are passed on",
        _REQUESTS,
        "        if state.request.is_finished() and gpu.holds_blocks(request_id):\n"
        "            return None\n"
        "        return Count.DROPPED_UNOWNED_IDS\n\n"
        "    def _refuse_sent",
        "        return None\n\n    def _refuse_sent",
        "I3",
        ("foreign-ids",),
    ),
    Mutant(
        "ids are passed on while the load is under way",
        _REQUESTS,
        "        if state.num_loads or (state.failing and not failed):",
        "        if state.failing and not failed:",
        "I3",
        ("foreign-ids",),
    ),
    Mutant(
        "an id is passed on twice",
        _REQUESTS,
        "            return Count.DROPPED_DUPLICATE_IDS if state.announced else None",
        "            return None",
        "I3",
        ("foreign-ids",),
    ),
    Mutant(
        "ids of requests that send nothing are passed on",
        _REQUESTS,
        "    def _refuse_sent(self, request_id: str, gpu: GpuBlocks) -> Count | None:\n",
        "    def _refuse_sent(self, request_id: str, gpu: GpuBlocks) -> Count | None:\n"
        "        return None\n",
        "I3",
        ("foreign-ids",),
    ),
    Mutant(
        "requests are told apart by their ids",
        _REQUESTS,
        "        if state is None or state.request is not request:",
        "        if state is None:",
        "I3",
        ("foreign-ids", "aborts"),
    ),
    Mutant(
        "a request whose load is under way counts as sent",
        _REQUESTS,
        "        if state.num_loads:\n"
        "            return Count.DROPPED_PREMATURE_IDS  # the load still writes the blocks\n",
        "",
        "I3",
        ("foreign-ids", "aborts"),
    ),
    # ---- I4: finishing is idempotent ----
    Mutant(
        "finishing twice stores twice",
        _STORES,
        "        if self._scan is not None and state.phase is Phase.RUNNING:",
        "        if self._scan is not None:",
        "I4",
        ("plain", "aborts"),
    ),
    Mutant(
        "a finished request can finish again",
        _REQUESTS,
        "        if state.finished:\n            return\n        state.drop_hit()",
        "        state.drop_hit()",
        "I4",
        ("plain",),
    ),
    # ---- I5: slots are taken in one step ----
    Mutant(
        "slots are asked for without a look at how many are free",
        "scheduler/slots.py",
        "        count = min(count, self.num_free)\n"
        "        try:\n"
        "            return self._pool.get_new_blocks(count) if count > 0 else []\n"
        "        except ValueError:  # somebody was faster; the pool raises before it takes any"
        "thing (I5)\n"
        "            return []\n",
        "        return self._pool.get_new_blocks(count)\n",
        "I5",
        ("tiny-host",),
    ),
    Mutant(
        "a partial grant is treated as full",
        _STORES,
        "            sources[:num_granted],\n            lease,",
        "            sources,\n            lease,",
        "I7",
        ("tiny-host",),
    ),
    Mutant(
        "the largest rank says how many slots there are",
        _PLANNER,
        "min(self._capacities.values())",
        "max(self._capacities.values())",
        "I5",
        ("uneven",),
    ),
    Mutant(
        "a pool that grows is open as a whole",
        "scheduler/slots.py",
        "            opened = blocks[self._num_usable + 1 : num_usable + 1]",
        "            opened = blocks[self._num_usable + 1 :]",
        "I5",
        ("warming",),
    ),
    Mutant(
        "the pool opens when the first rank is ready",
        _PLANNER,
        "        if len(self._capacities) == self._options.num_ranks:",
        "        if True:",
        "I5",
        ("uneven",),
    ),
    Mutant(
        "slots are let go as soon as their store is planned",
        _STORES,
        "        self._in_flight.add(store)\n",
        "        self._in_flight.add(store); self._leases._pool.release(lease.slots)\n",
        "I5",
        ("host-pressure",),
    ),
    # ---- I6: the right bytes ----
    Mutant(
        "no fence is planned",
        _STORES,
        "        return tuple(fences)",
        "        return ()",
        "I6",
        ("late-copies", "back-to-back"),
    ),
    Mutant(
        "the worker skips the fences",
        "worker/bridge.py",
        "            self._engine.fence(plan.fences)",
        "            pass",
        "I6",
        ("late-copies", "back-to-back"),
    ),
    Mutant(
        "the hash witness is compared, not identified",
        "scheduler/witness.py",
        "self.block.block_hash is not self.witness",
        "self.block.block_hash != self.witness",
        "I6",
        ("repeats",),
    ),
    Mutant(
        "blocks that V2 writes early are stored",
        _PLANNER,
        "        if self._options.blocks_written_early:",
        "        if False:",
        "I6",
        ("zeroed-early",),
    ),
    Mutant(
        "states that V2 moves early are forgotten",
        "compat.py",
        "    if state_group_ids:\n",
        "    if False:\n",
        "I6",
        ("mamba-v2",),
    ),
    Mutant(
        "a store is published after the first rank",
        _PLANNER,
        "            transfer.poisoned |= failed\n",
        "            transfer.poisoned |= failed\n            transfer.ranks_left.clear()\n",
        "I6",
        ("tensor-parallel", "pipeline"),
    ),
    Mutant(
        "a copy is done when it has been issued",
        "worker/engine.py",
        "            await job.completion.wait()\n",
        "            await asyncio.sleep(0)\n",
        "I6",
        ("late-copies",),
    ),
    Mutant(
        "a copy does not wait for the compute stream",
        "worker/engine.py",
        "        job = Job(copy, self._backend.mark(), size_bytes)",
        "        job = Job(copy, 0, size_bytes)",
        "I6",
        ("streams", "gpu"),
    ),
    Mutant(
        "a store that failed is published",
        _STORES,
        "        if store.poisoned:\n",
        "        if False:\n",
        "I6",
        ("failing",),
    ),
    Mutant(
        "a load that failed counts as done",
        _LOADS,
        "        if load.failed:\n",
        "        if False:\n",
        "I6",
        ("failing", "dying"),
    ),
    Mutant(
        "a copy that failed is reported as done",
        "worker/engine.py",
        "        self._settled.append((transfer_id, failure))",
        "        self._settled.append((transfer_id, None))",
        "I6",
        ("failing",),
    ),
    Mutant(
        "blocks are stored ahead of the forward that computes them",
        _STORES,
        "            (before if store.source_given_away() else after)",
        "            (before)",
        "I6",
        ("plain",),
    ),
    Mutant(
        "what was given away is stored behind the forward",
        _STORES,
        "            (before if store.source_given_away() else after)",
        "            (after)",
        "I6",
        ("host-pressure", "hybrid"),
    ),
    Mutant(
        "what finds no slot is stored later, overwritten or not",
        _STORES,
        "        leftover = [source for source in state.leftover if not source.given_away]\n",
        "        leftover = list(state.leftover)\n",
        "I6",
        ("hybrid-pressure",),
    ),
    Mutant(
        "stores in flight survive a reset",
        "scheduler/index.py",
        "        self.epoch += 1\n",
        "",
        "I6",
        ("resets",),
    ),
    Mutant(
        "slots are found after a reset",
        "scheduler/index.py",
        "        self.forget(slot for slot in self._pool.blocks if slot.block_hash is not None)",
        "        pass",
        "I6",
        ("resets",),
    ),
    Mutant(
        "slots are paired with blocks from the wrong end",
        _LOADS,
        "hit.slots_by_group[group_idx][: len(blocks)]",
        "hit.slots_by_group[group_idx][: len(blocks)][::-1]",
        "I6",
        ("plain",),
    ),
    Mutant(
        "the last token comes from the host too",
        _LOADS,
        "num_tokens_max = request.num_tokens - 1",
        "num_tokens_max = request.num_tokens",
        "I6",
        ("mamba",),
    ),
    Mutant(
        "a copy that is overdue is given up",
        "worker/engine.py",
        "            await job.completion.wait()\n",
        "            await asyncio.wait_for(job.completion.wait(), self._timeout_s)\n",
        "I6",
        ("overdue-gpu",),
    ),
    Mutant(
        "a copy that has begun counts as taken back",
        "worker/engine.py",
        "            job.taken_back = job.completion.cancel()\n",
        "            job.taken_back = True; job.completion.ended.set_exception(TimeoutError())\n",
        "I6",
        ("overdue", "overdue-gpu"),
    ),
    Mutant(
        "checksums are not compared",
        "worker/verify.py",
        "self._backend.checksums(slot_ids) != self._kept[slot_ids]",
        "slot_ids < 0",
        "I6",
        ("flips",),
    ),
    Mutant(
        "only some slots are compared",
        "worker/verify.py",
        "copy.slot_ids[transfer_id % self._every :: self._every]",
        "copy.slot_ids[:1]",
        "I6",
        ("flips",),
    ),
    Mutant(
        "a slot whose memory is bad is not retired",
        _PLANNER,
        "            self._retire(bad)",
        "            pass",
        "I6",
        ("flips",),
    ),
    Mutant(
        "a slot that is retired is granted again",
        "scheduler/slots.py",
        "        self._pool.touch(retired)\n",
        "",
        "I6",
        ("flips",),
    ),
    # ---- I7: everything ends ----
    Mutant(
        "stores wait without end",
        _STORES,
        "min(len(sources), self._num_blocks_max - self._in_flight.num_blocks)",
        "len(sources)",
        "I7",
        ("tight-flight",),
    ),
    Mutant(
        "hits are offered however often loads have failed",
        _LOADS,
        "        if state.must_compute or state.num_failed_loads >= FAILED_LOADS_MAX:",
        "        if state.must_compute:",
        "I7",
        ("loads-fail",),
    ),
    Mutant(
        "a request whose load failed is offered the next hit before it has run",
        _LOADS,
        "            state.must_compute = True\n",
        "",
        "I7",
        ("loads-fail",),
    ),
    Mutant(
        "a rank that is dead is still sent stores",
        _PLANNER,
        "        self._watch_failures(outcome)\n",
        "",
        "I7",
        ("dying",),
    ),
    Mutant(
        "a failed load is not announced",
        _PLANNER,
        "before, after, fences, self._loads.failures)",
        "before, after, fences, ())",
        "I7",
        ("failing", "dying"),
    ),
    Mutant(
        "the workers do not echo a failure",
        "worker/bridge.py",
        "        self._failures += plan.failures",
        "        pass",
        "I7",
        ("failing", "dying"),
    ),
    Mutant(
        "a hit whose load failed is offered again",
        _LOADS,
        "            self._index.forget(load.lease.slots)\n",
        "",
        "I7",
        ("failing", "dying"),
    ),
    Mutant(
        "what settled is not reported",
        "worker/engine.py",
        "        self._settled.append((transfer_id, failure))",
        "        pass",
        "I7",
        ("plain",),
    ),
    Mutant(
        "bytes in flight are never given back",
        "worker/turnstile.py",
        "            self._bytes -= job.size_bytes\n",
        "",
        "I7",
        ("tight-flight",),
    ),
    Mutant(
        "transfers of a dead loop are not reported",
        "worker/engine.py",
        "                if job.state is not JobState.SETTLED:\n",
        "                if False:\n",
        "I7",
        ("dying",),
    ),
    Mutant(
        "a transfer that cannot be issued ends the loop's task without a word",
        "worker/engine.py",
        "            failure = reason if isinstance(reason, FailureReason) else ",
        "            return; ",
        "I7",
        ("failing",),
    ),
    Mutant(
        "loads are admitted without a look at others",
        _LOADS,
        "        if not self._admission.admits(state, num_computed_tokens + hit.num_tokens):",
        "        if False:",
        "I7",
        ("hybrid-pressure",),
    ),
    # ---- I8: nothing is left ----
    Mutant(
        "the engine goes idle while stores are in flight",
        _PLANNER,
        "        return bool(len(self._stores) or self._loads.has_work)",
        "        return self._loads.has_work",
        "I8",
        ("late-copies",),
    ),
    Mutant(
        "the hit of a request that ends stays leased",
        _REQUESTS,
        "            return\n        state.drop_hit()\n        state.move(Phase.FINISHED)",
        "            return\n        state.move(Phase.FINISHED)",
        "I8",
        ("host-pressure", "aborts"),
    ),
    Mutant(
        "the prefix of a request that ends stays leased",
        _REQUESTS,
        "        if not state.num_stores:\n            state.drop_prefix()\n",
        "",
        "I8",
        ("plain",),
    ),
    Mutant(
        "the slots of a load stay leased",
        _LOADS,
        "        self._counters[Count.LOADED_BLOCKS] += len(load.lease.slots)\n"
        "        load.lease.release()\n",
        "        self._counters[Count.LOADED_BLOCKS] += len(load.lease.slots)\n",
        "I8",
        ("plain",),
    ),
    Mutant(
        "the slots of a store of nobody's stay leased",
        _STORES,
        "        if state is None:\n            store.lease.release()\n            return",
        "        if state is None:\n            return",
        "I8",
        ("lazy",),
    ),
)
