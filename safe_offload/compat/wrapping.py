"""Putting something around a method of vLLM's, once."""

import functools
from collections.abc import Callable
from typing import Any, Final

_MARK: Final = "_safe_offload_wraps"


def wrap(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Replace a method by what `make` returns for it; nothing happens if that was done before."""
    original = getattr(owner, name)
    if not is_wrapped(owner, name):
        wrapper = functools.wraps(original)(make(original))
        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)


def is_wrapped(owner: Any, name: str) -> bool:
    """Return whether `wrap` was called for a method."""
    return hasattr(getattr(owner, name), _MARK)
