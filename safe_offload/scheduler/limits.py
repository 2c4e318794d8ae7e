"""Limits that a client sets for its own request.

`max_offload_tokens` and `max_load_tokens` in `kv_transfer_params` are those of vLLM's
OffloadingConnector (vLLM 0.33.0, kv_connector/v1/offloading/scheduler.py, RequestOffloadState).
`pin_s` and `store` are this connector's. Other keys are invalid or another connector's, and
ignored, except `do_remote_prefill`, with which a router declares that another engine has the prompt
(NIXL).
"""

from __future__ import annotations

from dataclasses import dataclass

STORE_KEY, LOAD_KEY = "max_offload_tokens", "max_load_tokens"
PIN_KEY, KIND_KEY, NOTHING = "pin_s", "store", "nothing"
BROUGHT_KEY = "do_remote_prefill"
MAX_TOKENS = (1 << 31) - 1
MAX_PIN_S = 86400
ALLOWED = (
    f"an integer from 0 to {MAX_TOKENS}, for {PIN_KEY} a number from 0 to {MAX_PIN_S}, "
    f'for {KIND_KEY} "{NOTHING}"'
)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits and options of a request; None is no limit, 0 is nothing."""

    store_tokens: int | None = None  # only blocks that end within this many tokens are stored
    # The maximum number of tokens to load after those that the GPU has.
    load_tokens: int | None = None
    leaves_nothing: bool = False  # it is stored nowhere and leaves no statistics
    # How long it stays on the host after its last use; 0 unpins it, None changes nothing.
    pin_s: float | None = None
    # Its blocks are fetched from tiers even if that is not expected to pay.
    is_fetched: bool = False
    is_brought: bool = False  # another connector loads the prompt, so tiers are not probed


NO_LIMITS = Limits()


def read_limits(params: object) -> tuple[Limits, list[str]]:
    """Return the valid limits, and problems by key and type, never a value; never raises."""
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
    pin_s, kind = params.get(PIN_KEY), params.get(KIND_KEY)
    if pin_s is not None and not is_pin_time(pin_s):
        problems.append(f"{PIN_KEY} is of type {type(pin_s).__name__}, or out of range")
        pin_s = None
    if leaves_nothing := isinstance(kind, str) and kind == NOTHING:
        numbers[0], pin_s = 0, None
    elif kind is not None:
        problems.append(f"{KIND_KEY} is unknown, or of type {type(kind).__name__}")
    is_brought = bool(params.get(BROUGHT_KEY))
    limits = Limits(numbers[0], numbers[1], leaves_nothing, pin_s, is_brought=is_brought)
    return limits, problems


def is_pin_time(value: object) -> bool:
    """Return whether a value is a valid pin time."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= MAX_PIN_S


def _problem(value: object) -> str | None:
    if value is None:
        return None
    if type(value) is not int:  # True is an int too, and not meant as a number
        return f"of type {type(value).__name__}"
    if value < 0:
        return "negative"
    return "too large" if value > MAX_TOKENS else None
