"""How much of one request may be stored and loaded, as its client wrote it.

A client writes `"kv_transfer_params": {"max_offload_tokens": 0, "max_load_tokens": 0}`; names and
meanings are those of vLLM's OffloadingConnector (vLLM 0.33.0, kv_connector/v1/offloading/
scheduler.py, RequestOffloadState). Whatever else a client writes there is junk, or another
connector's: the request is served all the same. Of those, `do_remote_prefill` is read, by which a
router says that another engine has the prompt (NIXL, Mooncake).
"""

from __future__ import annotations

from dataclasses import dataclass

STORE_KEY, LOAD_KEY = "max_offload_tokens", "max_load_tokens"
BROUGHT_KEY = "do_remote_prefill"
MAX_TOKENS = (1 << 31) - 1
ALLOWED = f"a whole number of 0 to {MAX_TOKENS}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request allows; None is no limit, 0 is nothing.

    Attributes:
        store_tokens: only blocks that end within this many first tokens are stored.
        load_tokens: the most tokens, after those that the GPU has, come from the host.
        is_brought: another connector brings the prompt, so that tiers are not asked for it.
    """

    store_tokens: int | None = None
    load_tokens: int | None = None
    is_brought: bool = False


NO_LIMITS = Limits()


def read_limits(params: object) -> tuple[Limits, list[str]]:
    """Read a request's `kv_transfer_params`; never raises.

    Args:
        params: what the client wrote; keys of other connectors are left alone.

    Returns:
        The limits, without those that cannot be used, and what is wrong with these. That names
        keys and types, never a value: a client may have put its prompt there.
    """
    if params is None:
        return NO_LIMITS, []
    if not isinstance(params, dict):
        return NO_LIMITS, [f"kv_transfer_params is of type {type(params).__name__}, not a mapping"]
    problems: list[str] = []
    numbers: list[int | None] = []
    for key in (STORE_KEY, LOAD_KEY):
        value = params.get(key)
        problem = _problem(value)
        numbers.append(value if problem is None else None)
        if problem is not None:
            problems.append(f"{key} is {problem}")
    return Limits(numbers[0], numbers[1], bool(params.get(BROUGHT_KEY))), problems


def _problem(value: object) -> str | None:
    """What is wrong with a limit, if anything is."""
    if value is None:
        return None
    if type(value) is not int:  # True is an int too, and not meant as a number
        return f"of type {type(value).__name__}"
    if value < 0:
        return "negative"
    return "too large" if value > MAX_TOKENS else None
