"""Probes for how far a subject goes: the longest sequence that it takes."""

from __future__ import annotations

from collections.abc import Iterator

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.searching.costs import affords
from veriformer.properties.engine.searching.reaching import longest_taken
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.probes.findings import Finding, Question, a_stream


def longest_sequence(bench: Workbench) -> Iterator[Finding]:
    """Find the length beyond which the forward raises, where that is shorter than what it was built for."""
    subject = bench.subject
    if subject.kind not in SEQUENCES or subject.fact("max_len") is not None:
        return
    stream = a_stream(bench)
    longest = bench.configs[0].max_len
    if not affords(bench, longest):
        return
    with bench.trying(stream.built) as tried:
        works = longest_taken(Stream(stream.case, tried), longest)
    if works < longest:
        text = f"sequences longer than {works} raise, though {longest} were asked for: a defect, or its longest?"
        asks = Question("numerics.finite", text, f"max_len={works}")
        yield Finding("max_len", works, f"sequences of {works} + 1 raise", asks=asks)
