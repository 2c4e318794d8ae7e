"""Checkers: outside the code they check, each named after the promise it watches.

They see what crosses a border: what vLLM asks our connector and what it answers, the plans, the
reports of the ranks, the words in memory, vLLM's reference counts. They keep books of their own and
believe none of ours.
"""

from __future__ import annotations

from safe_offload.sim.checkers.completions import CompletionChecker
from safe_offload.sim.checkers.contents import ContentChecker
from safe_offload.sim.checkers.finishing import FinishChecker
from safe_offload.sim.checkers.hits import HitChecker
from safe_offload.sim.checkers.ledger import Ledger
from safe_offload.sim.checkers.progress import ProgressChecker
from safe_offload.sim.checkers.references import ReferenceChecker
from safe_offload.sim.checkers.slots import SlotChecker
from safe_offload.sim.checkers.waits import WaitChecker
from safe_offload.sim.engine_core import EngineCore


class Checkers:
    """All of them, on one engine."""

    def __init__(self, core: EngineCore) -> None:
        self.ledger = Ledger(core)
        self.hits = HitChecker(core, self.ledger)
        self.references = ReferenceChecker(core, self.ledger)
        self.completions = CompletionChecker(core, self.ledger)
        self.finishing = FinishChecker(core)
        self.slots = SlotChecker(core, self.ledger)
        self.contents = ContentChecker(core)
        self.progress = ProgressChecker(core, self.ledger)
        self.waits = WaitChecker(core, self.ledger)

    def after_step(self) -> None:
        """What must hold between any two steps.

        Raises:
            Finding: it does not.
        """
        self.references.check()
        self.progress.check()

    def after_drain(self) -> None:
        """What must hold when all work has drained.

        Raises:
            Finding: it does not.
        """
        self.references.check_drained()


__all__ = ["Checkers", "Ledger"]
