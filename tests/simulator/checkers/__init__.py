"""Checkers: outside the code they check, each named after the promise it watches.

They see what crosses a border: what vLLM asks our connector and what it answers, the plans, the
reports of the ranks, the words in memory, vLLM's reference counts. They keep books of their own and
believe none of ours.
"""

from tests.simulator.checkers.completions import CompletionChecker
from tests.simulator.checkers.contents import ContentChecker
from tests.simulator.checkers.events import EventChecker
from tests.simulator.checkers.finishing import FinishChecker
from tests.simulator.checkers.hits import HitChecker
from tests.simulator.checkers.ledger import Ledger
from tests.simulator.checkers.marks import MarkChecker
from tests.simulator.checkers.pins import PinChecker
from tests.simulator.checkers.progress import ProgressChecker
from tests.simulator.checkers.references import ReferenceChecker
from tests.simulator.checkers.slots import SlotChecker
from tests.simulator.checkers.tenants import TenantChecker
from tests.simulator.checkers.tiers import TierChecker
from tests.simulator.checkers.uncomputed import UncomputedChecker
from tests.simulator.checkers.waits import WaitChecker
from tests.simulator.engine_core import EngineCore


class Checkers:
    """All of them, on one engine."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.ledger = Ledger(core)
        self.hits = HitChecker(core, self.ledger)
        self.references = ReferenceChecker(core, self.ledger)
        self.completions = CompletionChecker(core, self.ledger)
        self.finishing = FinishChecker(core)
        self.slots = SlotChecker(core, self.ledger)
        self.contents = ContentChecker(core)
        self.uncomputed = UncomputedChecker(core)
        self.marks = MarkChecker(core)
        self.progress = ProgressChecker(core, self.ledger)
        self.waits = WaitChecker(core, self.ledger)
        self.events = EventChecker(core)
        if core.config.pin_share:
            self.pins = PinChecker(core, self.ledger)
        if core.config.tenants is not None:
            self.tenants = TenantChecker(core)
        if core.stores:
            self.tiers = TierChecker(core, self.ledger)

    def after_step(self) -> None:
        """What must hold between any two steps."""
        self.references.check()
        self.progress.check()
        self.events.check()
        if self.core.config.pin_share:
            self.pins.check()

    def after_drain(self) -> None:
        """What must hold when all work has drained."""
        self.references.check_drained()
        self.events.check_drained()


__all__ = ["Checkers", "Ledger"]
