"""What tests read from the connector's counts."""

from collections.abc import Mapping


def num_failed(counts: Mapping[str, int], direction: str) -> int:
    """Return how many transfers failed, "load" or "store", for whatever reason."""
    start = f'transfer_failures{{direction="{direction}"'
    return sum(number for name, number in counts.items() if name.startswith(start))
