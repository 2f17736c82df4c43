"""At which lengths and batch sizes a token-wise subject is wrong, and what it gives there."""

from __future__ import annotations

import torch

from veriformer.properties.diagnosis.batches import Batches

_LONGEST = 20
"""Beyond the usual chunks of small tests (4, 8, 16)."""


def wrong_lengths(batches: Batches) -> str | None:
    """Say from which length on, or at which lengths, tokens come out otherwise than by themselves."""
    if not batches.tokenwise:
        return None
    x = batches.draw(1, _LONGEST)
    right = batches.alone(x)
    outputs = [batches.together(x[:, :n]) for n in range(1, _LONGEST + 1)]
    if any(out.shape[1] != n for n, out in enumerate(outputs, 1)):
        return None
    differ = [batches.rows_differ(out, right[:, : out.shape[1]])[0] for out in outputs]
    wrong = [n for n, rows in enumerate(differ, 1) if bool(rows.any())]
    if not wrong or len(wrong) == _LONGEST:
        return _only_in_batches(batches) if not wrong else None
    rule = _rule(wrong)
    first = wrong[0]
    rows = differ[first - 1].nonzero().flatten().tolist()
    which = f"position {rows[0]}" if len(rows) == 1 else f"positions {rows[0]} to {rows[-1]}"
    zeros = bool((outputs[first - 1][0, rows] == 0).all())
    bias = not zeros and _constant(outputs, differ, batches)
    what = (
        "zeros" if zeros else "the same numbers whatever their tokens" if bias else "other numbers than by themselves"
    )
    told = f"with {first} tokens {which} of 0 to {first - 1} give{'s' if len(rows) == 1 else ''} {what}"
    return f"{rule}: {told}"


def _rule(wrong: list[int]) -> str:
    for size in range(2, _LONGEST // 2):
        for above in (0, size):
            if wrong == [n for n in range(above + 1, _LONGEST + 1) if n % size]:
                beyond = f" above {above}" if above else ""
                return f"wrong at every length{beyond} that is no multiple of {size}"
    if wrong == list(range(wrong[0], _LONGEST + 1)):
        return f"right up to {wrong[0] - 1} tokens, wrong from {wrong[0]} on"
    return f"wrong at lengths {', '.join(map(str, wrong[:8]))}{' ...' if len(wrong) > 8 else ''}, right at the others"


def _constant(outputs: list[torch.Tensor], differ: list[torch.Tensor], batches: Batches) -> bool:
    """Whether the wrong rows are one and the same vector."""
    rows = torch.cat([out[0][bad] for out, bad in zip(outputs, differ, strict=True)])
    return len(rows) > 1 and not batches.differs(rows, rows[:1].expand_as(rows))


def _only_in_batches(batches: Batches) -> str | None:
    """One sample is right at every length: say which other position reaches a wrong one, if that is simple."""
    x = batches.draw(3, 6)
    before = batches.together(x)
    if not batches.differs(before, batches.alone(x)):
        return None
    changed = x.clone()
    changed[0, 2] = batches.draw(1, 1)[0, 0]
    moved = batches.rows_differ(batches.together(changed), before).nonzero().tolist()
    others = [(b, t) for b, t in moved if (b, t) != (0, 2)]
    if others and all(t == 2 for _, t in others):
        return (
            "one sample alone is right; in a batch a token changes the outputs at the same position of other samples: "
            "something runs over the batch"
        )
    return None
