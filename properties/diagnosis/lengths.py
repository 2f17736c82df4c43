"""From which length on something is wrong, and of which blocks that speaks: found by bisecting."""

from __future__ import annotations

from collections.abc import Callable

from veriformer.properties.formulas.numbers import which

_SCANNED = 40
"""Lengths that are tried one by one: more than twice the usual tile of small tests (16)."""


def wrong_lengths(is_wrong: Callable[[int], bool], right: int, wrong: int, of: str) -> str | None:
    """Say from which length on, or at which lengths, something is wrong; None where that is not seen.

    Args:
        is_wrong: measures one length, on inputs of that length alone.
        right: a length below `wrong` that is right as far as was seen; 0 if there is none.
        wrong: one that was seen to be wrong.
        of: what is counted, in words ("entries", "tokens").

    >>> wrong_lengths(lambda n: n > 1024, 513, 1025, "entries")
    'right up to 1024 entries, wrong from 1025 on, as if from there on a second block of 1024 began'
    >>> wrong_lengths(lambda n: n > 64 and n % 64 > 0, 5, 65, "tokens")
    'right up to 64 tokens, wrong from 65 on except at multiples of 64: a last block of 64 that is not full'
    """
    if not is_wrong(wrong):
        return None
    if right and is_wrong(right):  # on inputs that were not drawn there
        right = 0
    if right < _SCANNED:
        numbers = range(1, _SCANNED + 1)
        bad = [n for n in numbers if is_wrong(n)]
        if bad:
            return f"wrong at {which(bad, numbers)} {of}, else right" if len(bad) < len(numbers) else None
    low, high = max(right, _SCANNED), wrong
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_wrong(middle) else (middle, high)
    if any(is_wrong(n) for n in (low // 2, 3 * low // 4)):
        return None
    start = f"right up to {low} {of}, wrong from {high} on"
    whole, rest = ([is_wrong(times * low + more) for times in (2, 3)] for more in (0, 1))
    if not any(whole) and all(rest):
        return f"{start} except at multiples of {low}: a last block of {low} that is not full"
    if all(whole) and all(rest) and not low % 8:
        return f"{start}, as if from there on a second block of {low} began"
    return start if all(whole) and all(rest) else f"right at {low} {of}, wrong at {high}"
