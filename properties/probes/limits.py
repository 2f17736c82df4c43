"""Probes for how far a subject goes: the longest sequence that it takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.probes.findings import Finding, Question, a_stream


def longest_sequence(bench: Workbench) -> Iterator[Finding]:
    """Find the length beyond which the forward raises, where that is shorter than what it was built for."""
    subject = bench.subject
    if subject.kind not in SEQUENCES or subject.fact("max_len") is not None:
        return
    stream = a_stream(bench)
    with bench.trying(stream.built) as tried:
        yield from _longest(Stream(stream.case, tried), bench.configs[0].max_len)


def _longest(stream: Stream, longest: int) -> Iterator[Finding]:
    if _takes(stream, longest) or not _takes(stream, 2):
        return
    works, raises = 2, longest
    while raises - works > 1:
        middle = (works + raises) // 2
        works, raises = (middle, raises) if _takes(stream, middle) else (works, middle)
    text = f"sequences longer than {works} raise, though {longest} were asked for: a defect, or its longest?"
    asks = Question("numerics.finite", text, f"max_len={works}")
    yield Finding("max_len", works, f"sequences of {works} + 1 raise", asks=asks)


def _takes(stream: Stream, length: int) -> bool:
    try:
        with torch.no_grad():
            stream(stream.draw(2, length))
    except SubjectError:
        return False
    return True
