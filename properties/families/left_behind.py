"""What a call under a mask leaves for later calls without one; part of `numerics.stateless`."""

from __future__ import annotations

import torch

from veriformer.properties.bench.pool import Built
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.subject.paths import Path

_LENGTHS = (19, 17, 23, 22)
"""Positions that no other property takes as a rule: what is kept by the shape of a call was kept by none before."""


def masks_leave_nothing(case: Case, built: Built) -> None:
    """Call without a mask before and after a call of the same shape in which some positions are hidden.

    One sample: a mask of all positions for each other that is kept and written to has no axis of samples.
    """
    subject = case.subject
    if subject.kind not in SEQUENCES or not subject.takes_mask("padding"):
        return
    longest = min(built.config.max_len, subject.fact("max_len", built.config.max_len))
    lengths = [n for n in _LENGTHS if n <= longest and n >= subject.shortest]
    for side, length in zip(sides(subject, masked=True), lengths, strict=False):
        # a model of its own: what an earlier case left behind would hide what this one leaves
        own = case.bench.pool.fresh(built.config, built.dtype, raw=built.is_raw)
        stream, plain = Stream(case, own, side=side), Path(mask="none")
        x, other = stream.draw(1, length), stream.draw(1, length)
        mask = torch.ones(1, length, dtype=torch.bool, device=x.device)
        hidden = slice(0, 3) if subject.fact("padding_side") == "left" else slice(length - 3, length)
        mask[:, hidden] = False
        before = stream(x, path=plain).clone()
        stream(other, mask)
        case.close(
            stream(x, path=plain),
            before,
            "the same call gives another output after one in which positions were hidden",
            constants_allowed=True,
            cause=lambda: "a mask that is kept from call to call is written to: what one call hides stays hidden",
        )
