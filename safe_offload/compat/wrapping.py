"""Wraps methods of vLLM's classes, once, now or when their module is imported."""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

_MARK: Final = "_safe_offload_wraps"

logger = logging.getLogger(f"vllm.{__name__}")


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method, once, by `around`, which gets the original method before the arguments."""
    original = getattr(owner, name)
    if not is_wrapped(owner, name):

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(wrapper, _MARK, True)
        setattr(owner, name, wrapper)


def is_wrapped(owner: Any, name: str) -> bool:
    """Return whether `wrap` has replaced a method."""
    return hasattr(getattr(owner, name), _MARK)


def when_imported(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with a module, now or as soon as it is imported; never raises."""
    if name in sys.modules:
        _try(change, sys.modules[name])
    elif not any(isinstance(f, _ChangeWhenImported) and f.name == name for f in sys.meta_path):
        sys.meta_path.insert(0, _ChangeWhenImported(name, change))


class _ChangeWhenImported(MetaPathFinder):
    """A finder that changes one module after its execution, and then removes itself."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self.name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, whose loader then also changes the module."""
        if fullname != self.name:
            return None
        try:
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(fullname)
            if spec is None or spec.loader is None:
                return spec
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _try(self._change, module)

            # The loader is of this module alone. (mypy refuses to assign to a method.)
            setattr(spec.loader, "exec_module", execute_and_change)  # noqa: B010
        except Exception:
            logger.debug("The import of %s is not watched", fullname, exc_info=True)
            return None
        return spec


def _try(change: Callable[[Any], None], module: ModuleType) -> None:
    try:
        change(module)
    except Exception:
        # `plugin.register` reports the same failure of KVTransferConfig. Without the other wrappers
        # media stay out of tiers, and vLLM chooses the KV cache layout.
        logger.debug("A class of vLLM is not wrapped: %s", module, exc_info=True)
