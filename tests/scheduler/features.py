"""Finds the features and the tiers of a planner."""

from typing import TypeVar

from safe_offload.scheduler.feature import Feature
from safe_offload.scheduler.planner import Planner
from safe_offload.scheduler.tiers.tiers import Tiers

Kind = TypeVar("Kind", bound=Feature)


def feature_of(planner: Planner, kind: type[Kind]) -> Kind:
    """Return the feature of a kind, which the planner has."""
    return next(feature for feature in planner.features if isinstance(feature, kind))


def tiers_of(planner: Planner) -> Tiers:
    """Return the tiers of a planner that has some."""
    assert planner.tiers is not None
    return planner.tiers
