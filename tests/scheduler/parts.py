"""Finds the parts of a planner."""

from typing import TypeVar

from safe_offload.scheduler.part import Part
from safe_offload.scheduler.planner import Planner

Kind = TypeVar("Kind", bound=Part)


def part_of(planner: Planner, kind: type[Kind]) -> Kind:
    """Return the part of a kind, which the planner has."""
    return next(part for part in planner.parts if isinstance(part, kind))
