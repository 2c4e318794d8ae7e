"""I13: a tenant that has no more than it is guaranteed loses no host slot to another's grant."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from safe_offload.config.tenants import REST, WHOLE, Tenants
from tests.simulator.checkers.taps import tap
from tests.simulator.engine_core import EngineCore
from tests.simulator.findings import Finding


class TenantChecker:
    """Keeps whose each slot is by the salts of the requests whose hashes are stored in it."""

    def __init__(self, core: EngineCore) -> None:
        self._planner = core.connector.side
        self._slots = self._planner.hits.slots
        self._directory = self._planner.hits.directory
        self._requests: list[Any] = []
        self._salts: dict[bytes, str | None] = {}
        self._labels: dict[int, str] = {}
        self._tenants: Tenants = self._slots.quotas.tenants
        self._lost: dict[int, tuple[Counter[str], Counter[str]]] = {}
        """By granted slot: how many slots each tenant lost to that grant, and might have lost."""
        tap(core.connector, "on_new_request", self._see_request)
        tap(self._slots, "use_tenants", self._see_use)
        tap(self._slots, "grant", self._see_grant)
        tap(self._directory, "begin_store", self._see_store)

    def _see_request(self, original: Callable[[Any], None], request: Any) -> None:
        self._requests.append(request)
        original(request)

    def _see_use(self, original: Callable[[Tenants], None], tenants: Tenants) -> None:
        original(tenants)
        self._tenants = tenants
        for slot, label in self._labels.items():
            self._labels[slot] = label if label in tenants.labels else REST

    def _see_grant(self, original: Callable[..., list[int]], count: int, *salt: Any) -> list[int]:
        leased = {slot for lease in self._planner.leases for slot in lease.slots}
        filled = {slot for slot in self._labels if self._directory.hashes[slot] is not None}
        held = Counter(self._labels[slot] for slot in self._labels.keys() & (leased | filled))
        num_usable = self._slots.num_usable
        shares = dict(zip(self._tenants.labels, self._tenants.shares, strict=True))
        spare = Counter(
            {label: max(0, n - shares[label] * num_usable // WHOLE) for label, n in held.items()}
        )
        granted = original(count, *salt)
        lost = Counter(self._labels[slot] for slot in granted if slot in filled)
        for slot in granted:
            self._labels.pop(slot, None)
            self._lost[slot] = lost, spare
        return granted

    def _see_store(
        self,
        original: Callable[..., None],
        slots: Sequence[int],
        group_idx: int,
        hashes: Sequence[bytes],
        *more: Any,
    ) -> None:
        for request in self._requests if not self._salts.keys() >= set(hashes) else ():
            self._salts.update(dict.fromkeys(request.block_hashes, request.cache_salt))
        for slot, block_hash in zip(slots, hashes, strict=True):
            asking = self._labels[slot] = self._label_of(block_hash)
            lost, spare = self._lost.pop(slot, (Counter[str](), Counter[str]()))
            for label, count in lost.items():
                if label != asking and count > spare[label]:
                    raise Finding(
                        "I13",
                        f"{asking} took {count} slots of {label}, which has {spare[label]} more "
                        "than it is guaranteed",
                    )
        original(slots, group_idx, hashes, *more)

    def _label_of(self, block_hash: bytes) -> str:
        return self._tenants.labels[self._tenants.number_of(self._salts[block_hash])]
