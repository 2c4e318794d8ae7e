"""I14: what is pinned stays for its time and no longer; what is to leave nothing is not stored."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from safe_offload.protocol import StepPlan
from safe_offload.scheduler.cache.leases import LeaseKind
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.taps import RESETS, tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


@dataclass(eq=False)
class Promise:
    """What a client was told: these slots stay."""

    pin_s: float
    slots: dict[int, bytes]
    until_min_s: float  # it may end then
    until_max_s: float  # it must have ended then, unless a request uses it
    users: set[str] = field(default_factory=set)


class PinChecker:
    """Keeps a book of what clients were told, and of what each request begins with.

    Which slots, and how long, is only known where a hit is a run of blocks. Elsewhere that no lease
    is left in the end is all that is checked (`ReferenceChecker`), and what is stored.
    """

    def __init__(self, core: EngineCore, ledger: Ledger) -> None:
        self._core, self._ledger = core, ledger
        self._side = core.connector.side
        self._is_plain = self._side.hits.geometry.is_plain
        self._promises: dict[bytes, Promise] = {}
        self._planned_s = 0.0
        self._secret: list[Any] = []
        self._open: list[Any] = [] if core.node is None else core.node.open_requests
        tap(core.scheduler, "add_request", self._see_request)
        tap(core.connector, "request_finished_all_groups", self._see_finish)
        for name in RESETS:
            tap(core.connector, name, self._see_reset)
        tap(core.connector, "build_connector_meta", self._see_planning)
        tap(self._side.hits.slots, "grant", self._see_grant)
        self._may_have_ended = False  # pins whose tenants are guaranteed less than before
        tap(self._side.hits.slots, "use_tenants", self._see_tenants)
        tap(self._side.hits.directory, "forget", self._see_forget)
        if core.node is not None:
            core.node.watch(core, self._see_written)
        ledger.on_plan.append(self._see_plan)

    def _of(self, hashes: Iterable[bytes]) -> list[Promise]:
        return [self._promises[h] for h in hashes if h in self._promises]

    def _see_request(self, original: Callable[[Any], None], request: Any) -> None:
        params = request.kv_transfer_params or {}
        is_secret = params.get("store") == "nothing"
        (self._secret if is_secret else self._open).append(request)
        if not is_secret:
            for promise in self._of(request.block_hashes):
                promise.users.add(request.request_id)
        original(request)

    def _see_finish(self, original: Callable[..., Any], request: Any, blocks: Any) -> Any:
        params = dict(request.kv_transfer_params or {})
        answer = original(request, blocks)
        if not self._is_plain:
            return answer
        now_s = self._core.clock.now_s
        for promise in self._promises.values():
            if request.request_id in promise.users:
                promise.users.discard(request.request_id)
                promise.until_max_s = max(promise.until_max_s, now_s + promise.pin_s)
        if params.get("pin_s") == 0:
            for block_hash in [h for h in request.block_hashes if h in self._promises]:
                del self._promises[block_hash]
        pin_s, num_tokens = self._asked(params, answer[1], request)
        if pin_s and num_tokens:
            self._promise(request, pin_s, num_tokens, is_told=answer[1] is not None)
        return answer

    def _asked(self, params: dict[str, Any], told: Any, request: Any) -> tuple[float, int]:
        """How long, and how many tokens; of a hint nothing is told, so as many as are there."""
        if told is not None:
            return params["pin_s"], told["pinned_tokens"]
        action = params.get("kv_hints", {}).get("actions", [{}])[0]
        if action.get("action_type") != "kv.retain":
            return 0, 0
        return action["payload"]["ttl_s"], len(request.block_hashes) * self._core.shape.hash_tokens

    def _promise(self, request: Any, pin_s: float, num_tokens: int, *, is_told: bool) -> None:
        size = self._core.shape.hash_tokens
        num_wanted = (request.num_prompt_tokens - 1) // size
        pinned = {slot for lease in self._pin_leases() for slot in lease.slots}
        slots: dict[int, bytes] = {}
        for block_hash in request.block_hashes[: num_tokens // size]:
            slot = self._side.hits.directory.tables[0].get(block_hash)
            if slot is None or slot not in pinned:
                break
            slots[slot] = block_hash
        if is_told and len(slots) < num_tokens // size:
            raise Finding("I14", f"{request.request_id} was told of {num_tokens} pinned tokens")
        num_blocks = min(num_wanted, len(slots))
        if not num_blocks:
            return
        key, now_s = request.block_hashes[num_blocks - 1], self._core.clock.now_s
        promise = self._promises.setdefault(key, Promise(0, {}, -math.inf, -math.inf))
        promise.pin_s = max(promise.pin_s, pin_s)
        promise.slots.update(slots)
        promise.until_min_s = max(promise.until_min_s, self._planned_s + pin_s)
        promise.until_max_s = max(promise.until_max_s, now_s + promise.pin_s)

    def _pin_leases(self) -> list[Any]:
        return [lease for lease in self._side.leases if lease.kind is LeaseKind.PIN]

    def _see_reset(self, original: Callable[..., Any], *args: Any) -> Any:
        self._promises.clear()
        return original(*args)

    def _see_planning(self, original: Callable[[Any], Any], output: Any) -> Any:
        self._planned_s = self._core.clock.now_s
        return original(output)

    def _see_tenants(self, original: Callable[[Any], None], tenants: Any) -> None:
        original(tenants)
        self._may_have_ended = True

    def _see_grant(self, original: Callable[..., list[int]], count: int, *salt: Any) -> list[int]:
        if self._may_have_ended:
            self._may_have_ended = False
            pinned = {slot for lease in self._pin_leases() for slot in lease.slots}
            for key, promise in list(self._promises.items()):
                if not promise.slots.keys() <= pinned:
                    del self._promises[key]
        slots = original(count, *salt)
        for promise in self._promises.values():
            lost = promise.slots.keys() & slots
            if lost and promise.until_min_s > self._core.clock.now_s:
                raise Finding("I14", f"slots {lost} are pinned, and are given to others")
        return slots

    def _see_forget(self, original: Callable[..., list[int]], slots: Any) -> list[int]:
        found = {slot for slot in slots if slot not in self._side.hits.directory.being_stored}
        lost = original(slots)
        for promise in self._promises.values():
            gone = promise.slots.keys() & lost
            if gone & found and promise.until_min_s > self._core.clock.now_s:
                failed = (r.transfer.slot_ids for r in self._ledger.records() if r.has_failed)
                if gone := gone & found - self._ledger.bad_slots.union(*failed):
                    raise Finding("I14", f"slots {gone} are pinned, and are found no more")
            for slot in promise.slots.keys() & lost:
                del promise.slots[slot]
        return lost

    def _see_written(self, slots: Iterable[int]) -> None:
        if self._core.node is None or self._ledger not in self._core.node.ledgers:
            return  # this engine is dead
        written = set(slots)
        for promise in self._promises.values():
            if promise.until_min_s > self._core.clock.now_s and promise.slots.keys() & written:
                raise Finding("I14", "another engine overwrites pinned slots")

    def _see_plan(self, plan: StepPlan) -> None:
        if not self._is_plain:
            return
        now_s = self._core.clock.now_s
        over = [k for k, p in self._promises.items() if p.until_max_s <= now_s and not p.users]
        for key in over:
            del self._promises[key]
        num_pins = self._side.gauges()["pins"]
        if num_pins > len(self._promises):
            raise Finding("I14", f"{num_pins} pins, of {len(self._promises)} asked for")
        if not self._promises and self._pin_leases():
            raise Finding("I14", "slots stay pinned for nobody")

    def check(self) -> None:
        """Nothing that is to be left nowhere is in the directory, unless others had it too."""
        if not self._secret:
            return
        shared = {h for request in self._open for h in request.block_hashes}
        secret = {h for request in self._secret for h in request.block_hashes} - shared
        length = len(next(iter(secret), b""))
        for table in self._side.hits.directory.tables:
            if any(block_hash[-length:] in secret for block_hash in table):
                raise Finding("I14", "something is stored that was to be stored nowhere")
