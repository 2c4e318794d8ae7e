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
_HARVEST, _SOURCES = "scheduler/harvest.py", "scheduler/sources.py"
_SLOTS, _INDEX, _RANKS = "scheduler/slots.py", "scheduler/index.py", "scheduler/ranks.py"
_GPU_BLOCKS, _WITNESS = "scheduler/gpu_blocks.py", "scheduler/witness.py"

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
        "lease.keep(LeaseKind.LOAD, slots)",
        "lease.keep(LeaseKind.LOAD, [])",
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
    Mutant(
        "a slot that two lease is free when one lets go",
        _SLOTS,
        "            more.update(leased.intersection(slots))\n",
        "",
        "I8",
        ("plain",),
    ),
    Mutant(
        "a slot that several lease is free when one lets go",
        _SLOTS,
        "        if more and not more.keys().isdisjoint(slots):\n",
        "        if False:\n",
        "I8",
        ("host-pressure",),
    ),
    # ---- I2: no reference on a GPU block ----
    Mutant(
        "a finished request's block is referenced until its store is done",
        _PLANNER,
        "            if not self._is_disabled:\n"
        "                self._harvest.add_finished(state)\n",
        "            for b in self._gpu.tables_of(0)[0][request.request_id][:1]: b.ref_cnt += 1\n",
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
        ("foreign-ids-queue",),
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
        _HARVEST,
        "        if state.phase is not Phase.RUNNING:\n            return\n        if self._scan",
        "        if state.phase not in (Phase.RUNNING, Phase.FINISHED):\n"
        "            return\n"
        "        if self._scan",
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
        "slots are taken without a look at how many are empty",
        _SLOTS,
        "        del self._empty[-count:]\n",
        "        [self._empty.pop() for _ in range(count)]\n",
        "I5",
        ("tiny-host",),
    ),
    Mutant(
        "a partial grant is treated as full",
        _HARVEST,
        "            sources = sources.part(range(num_granted))\n",
        "",
        "I7",
        ("tiny-host",),
    ),
    Mutant(
        "a partial grant to several requests is treated as full",
        _HARVEST,
        "        if lease is None or len(lease.slots) < count:\n",
        "        if lease is None:\n",
        "I7",
        ("tiny-host", "host-pressure"),
    ),
    Mutant(
        "the largest rank says how many slots there are",
        _RANKS,
        "min(self._capacities.values())",
        "max(self._capacities.values())",
        "I5",
        ("uneven",),
    ),
    Mutant(
        "a pool that grows is open as a whole",
        _SLOTS,
        "range(self.num_usable, min(num_usable, self.num_slots))",
        "range(self.num_usable, self.num_slots)",
        "I5",
        ("warming",),
    ),
    Mutant(
        "the pool opens when the first rank is ready",
        _RANKS,
        "        if len(self._capacities) == self._num_ranks:",
        "        if True:",
        "I5",
        ("uneven",),
    ),
    Mutant(
        "a slot that is granted stays among the empty ones",
        _SLOTS,
        "        del self._empty[-count:]\n",
        "",
        "I5",
        ("host-pressure",),
    ),
    # ---- I6: the right bytes ----
    Mutant(
        "no fence is planned",
        _STORES,
        "tuple(store.transfer_id for store in fenced)",
        "()",
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
        "stores that no hook has started are started behind the fences of the next plan",
        "worker/bridge.py",
        "        if self._is_forward_issued:\n"
        "            self.start_stores()  # of the last step, if no hook has\n"
        "        for transfer in plan.stores_before_forward:\n"
        "            self._submit(Direction.STORE, transfer)\n"
        "        if plan.fences and self._engine is not None:\n"
        "            self._engine.fence(plan.fences)\n",
        "        for transfer in plan.stores_before_forward:\n"
        "            self._submit(Direction.STORE, transfer)\n"
        "        if plan.fences and self._engine is not None:\n"
        "            self._engine.fence(plan.fences)\n"
        "        if self._is_forward_issued:\n"
        "            self.start_stores()\n",
        "I6",
        ("pipeline-drafts",),
    ),
    Mutant(
        "stores that no hook has started are cancelled",
        "worker/bridge.py",
        "            self.start_stores()  # of the last step, if no hook has\n",
        "            pass\n",
        "I7",
        ("pipeline-drafts",),
    ),
    Mutant(
        "the hash witness is compared, not identified",
        _WITNESS,
        "        return any(map(is_not, hashes_of(self.blocks), self.witnesses))",
        "        return hashes_of(self.blocks) != self.witnesses",
        "I6",
        ("repeats",),
    ),
    Mutant(
        "the blocks of a request are its own, whichever table it has",
        _GPU_BLOCKS,
        "        return self.tables.get(self.request_id) is self.table",
        "        return self.request_id in self.tables",
        "I6",
        ("preemption", "late-copies", "back-to-back", "priority"),
    ),
    Mutant(
        "a window's blocks count as kept for as long as its table is there",
        _GPU_BLOCKS,
        "[type(m) is FullAttentionManager for m in self._managers]",
        "[True for _ in self._managers]",
        "I6",
        ("hybrid", "hybrid-gpu", "chunked", "hybrid-pressure"),
    ),
    Mutant(
        "blocks that V2 writes early are stored",
        _PLANNER,
        "        if not self._options.blocks_written_early:",
        "        if True:",
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
        ("pipeline", "tensor-parallel"),
    ),
    Mutant(
        "a slot is found while it is being stored",
        _SLOTS,
        "        if not self._being_stored.isdisjoint(slots):\n",
        "        if False:\n",
        "I6",
        ("late-copies",),
    ),
    Mutant(
        "a slot is found while it is being stored, of several groups",
        _SLOTS,
        "        return None if slot in self._being_stored else slot",
        "        return slot",
        "I6",
        ("hybrid", "zeroed"),
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
        "            if store.poisoned:\n                self._index",
        "            if False:\n                self._index",
        "I6",
        ("failing",),
    ),
    Mutant(
        "a store that failed counts as being stored for ever",
        _STORES,
        "            if store.poisoned:\n"
        "                self._index.slots.forget(part.lease.slots)\n"
        "            elif",
        "            if store.poisoned:\n                pass\n            elif",
        "I8",
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
        "                after = (_transfer(self._make(intact",
        "                before += (_transfer(self._make(intact",
        "I6",
        ("plain",),
    ),
    Mutant(
        "what was given away is stored behind the forward",
        _STORES,
        "            given_away = [part for part in found if part.sources.given_away()]\n",
        "            given_away = []\n",
        "I6",
        ("host-pressure", "hybrid"),
    ),
    Mutant(
        "lazy: what a finished request has lost is stored behind the forward",
        _HARVEST,
        "                self._add(None, self._still_wanted(sources), Found.EARLIER)\n",
        "                self._add(None, self._still_wanted(sources), Found.NOW)\n",
        "I6",
        ("lazy", "lazy-pressure"),
    ),
    Mutant(
        "lazy: what a preempted request has lost is stored behind the forward",
        _SOURCES,
        "lost.append(block, _NO_WITNESS, block_hash)",
        "lost.append(block, witness, block_hash)",
        "I6",
        ("lazy-pressure", "lazy"),
    ),
    Mutant(
        "lazy: what a load overwrites is stored one step too late",
        _PLANNER,
        "            self._harvest.add_given_away()\n",
        "            if scheduled: self._harvest.add_given_away()\n",
        "I6",
        ("lazy-pressure",),
    ),
    Mutant(
        "lazy: what was hashed for a request that the same step preempted is stored",
        _SOURCES,
        "            witnesses = [None if w is known else w for w, known in pairs]\n",
        "            witnesses = [w for w, known in pairs]\n",
        "I6",
        ("lazy-priority",),
    ),
    Mutant(
        "lazy: a preempted request's blocks are stored whether computed or not",
        _SOURCES,
        "self.table[first:num_blocks]",
        "self.table[first:]",
        "I6",
        ("lazy-pressure", "lazy"),
    ),
    Mutant(
        "a preempted request's blocks are stored with the one that it was about to fill",
        _SOURCES,
        "        num_tokens: int = request.num_tokens - 1\n",
        "        num_tokens: int = request.num_tokens\n",
        "I6",
        ("preemption", "sparse-windows"),
    ),
    Mutant(
        "what finds no slot is stored later, overwritten or not",
        _HARVEST,
        "self._still_wanted(sources.intact()), when)",
        "self._still_wanted(sources), when)",
        "I6",
        ("hybrid-pressure",),
    ),
    Mutant(
        "what finds no slot is rescued at preemption, overwritten or not",
        _HARVEST,
        "            intact = [sources.intact() for sources in state.leftover]\n",
        "            intact = state.leftover\n",
        "I6",
        ("hybrid-pressure", "hybrid-gpu"),
    ),
    Mutant(
        "what two requests compute in one step is stored twice",
        _HARVEST,
        "        if len(set(sources.hashes)) < count:\n",
        "        if False:\n",
        "I7",
        ("plain", "late-copies"),
    ),
    Mutant(
        "blocks that hold the same are stored twice",
        _SOURCES,
        "        if witness is None or witness in seen:",
        "        if witness is None:",
        "I5",
        ("lazy-pressure",),
    ),
    Mutant(
        "stores in flight survive a reset",
        _INDEX,
        "        self.epoch += 1\n        self.slots.forget_all()",
        "        self.slots.forget(self.slots.kept())",
        "I6",
        ("resets",),
    ),
    Mutant(
        "slots are found after a reset",
        _INDEX,
        "        self.slots.forget_all()",
        "        pass",
        "I6",
        ("resets",),
    ),
    Mutant(
        "slots are paired with blocks from the wrong end",
        _LOADS,
        "hit.slots_by_group[group_idx][: len(block_ids)]",
        "hit.slots_by_group[group_idx][: len(block_ids)][::-1]",
        "I6",
        ("plain",),
    ),
    Mutant(
        "a prefix's hashes are counted from its first block in every step",
        _SOURCES,
        "state.request.block_hashes[first : first + len(blocks)]",
        "state.request.block_hashes[: len(blocks)]",
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
        "            self._ranks.retire(bad)",
        "            pass",
        "I6",
        ("flips",),
    ),
    Mutant(
        "a slot that is retired is granted again",
        _SLOTS,
        "        self.lease(retired)\n",
        "",
        "I6",
        ("flips",),
    ),
    # ---- I7: everything ends ----
    Mutant(
        "stores wait without end",
        _HARVEST,
        "min(num_found, self._num_blocks_max - self.num_blocks)",
        "num_found",
        "I7",
        ("tight-flight",),
    ),
    Mutant(
        "stores of several requests wait without end",
        _HARVEST,
        "        if count > self._num_blocks_max - self.num_blocks:\n",
        "        if False:\n",
        "I7",
        ("tight-flight",),
    ),
    Mutant(
        "what has been stored counts as waiting",
        _HARVEST,
        "        self.num_blocks -= len(part.sources.blocks)\n",
        "        pass\n",
        "I8",
        ("plain",),
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
        _RANKS,
        "        self.has_dead = True\n",
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
        "            self._index.slots.forget(load.lease.slots)\n",
        "",
        "I7",
        ("failing", "dying"),
    ),
    Mutant(
        "a hit that waits is offered again although its slots were forgotten",
        _INDEX,
        "        if hit.as_of[1] != self.slots.num_forgets:\n",
        "        if False:\n",
        "I7",
        ("failing", "all-faults", "all-faults-plain", "dying"),
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
        "lazy: the walk goes on behind a block that has left the queue",
        _GPU_BLOCKS,
        "            block.ref_cnt == 0\n            and block.prev_free_block is self.before\n",
        "            block is not None\n",
        "I7",
        ("lazy", "lazy-pressure"),
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
        "        return bool(len(self._stores) or self._harvest.found or self._loads.has_work)",
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
        "the prefix of a request that ends before its stores stays leased",
        _STORES,
        "                ended.append(state)\n",
        "                pass\n",
        "I8",
        ("late-copies",),
    ),
    Mutant(
        "the slots of a load stay leased",
        _LOADS,
        "            state.loaded = load.lease\n",
        "            pass\n",
        "I8",
        ("plain",),
    ),
    Mutant(
        "the slots of a load stay leased if its request has ended",
        _LOADS,
        "        if state.finished:\n            load.lease.release()\n",
        "        if state.finished:\n            pass\n",
        "I8",
        ("aborts",),
    ),
    Mutant(
        "the slots of a store of nobody's stay leased",
        "scheduler/leases.py",
        "        self.slots = left + slots[start:]\n        self.release()",
        "        self.slots = left + slots[start:]",
        "I8",
        ("lazy",),
    ),
)
