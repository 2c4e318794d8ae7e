"""Whole numbers, rounded up."""


def ceil_div(number: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-number // divisor)


def round_up(number: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-number // unit) * unit
