"""Looking at a call between two parties."""

from collections.abc import Callable
from typing import Any

RESETS = ("reset_cache", "weights_changed")
"""Methods of the connector that make it forget everything."""


def tap(target: Any, name: str, seen_by: Callable[..., Any]) -> None:
    """Put `seen_by(original, *args, **kwargs)` in place of a method of one object."""
    original = getattr(target, name)

    def tapped(*args: Any, **kwargs: Any) -> Any:
        return seen_by(original, *args, **kwargs)

    setattr(target, name, tapped)
