"""Numbers (labels, widths, lengths) at which something is wrong, in words."""

from __future__ import annotations

from collections.abc import Sequence


def which(wrong: Sequence[int], numbers: Sequence[int]) -> str:
    """Say which of some consecutive numbers are wrong.

    >>> which([4, 8], range(11))
    '4, 8 (the multiples of 4 from 4 on)'
    >>> which([9, 10, 11, 13, 14, 15], range(1, 17))
    '9, 10, 11, 13, 14, 15 (from 9 on, those that are no multiple of 4)'
    >>> which([5, 6], range(7))
    '5, 6 (all from 5 on)'

    Args:
        wrong: those that are, in order.
        numbers: that were tried.
    """
    listed = ", ".join(map(str, wrong[:8])) + (" ..." if len(wrong) > 8 else "")
    rule = _rule(list(wrong), numbers)
    return f"{listed} ({rule})" if rule else listed


def _rule(wrong: list[int], numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(wrong) == 1:
        return "alone"
    if wrong == list(range(wrong[0], last + 1)):
        return f"all from {wrong[0]} on"
    if wrong == list(range(first, wrong[-1] + 1)):
        return f"all up to {wrong[-1]}"
    for size in range(2, (last - first) // 2 + 1):
        for start in sorted({first, wrong[0]}):
            if wrong == [n for n in range(start, last + 1) if n % size]:
                return f"{f'from {start} on, ' if start > first else ''}those that are no multiple of {size}"
        for rest in range(size):
            at = [n for n in numbers if n % size == rest]
            if wrong in (at, at[1:]):
                what = f"the multiples of {size}" if not rest else f"those that leave {rest} when divided by {size}"
                return f"{what}{f' from {wrong[0]} on' if wrong[0] != first else ''}"
    return ""
