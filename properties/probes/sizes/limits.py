"""How long a sequence a subject takes: asked for by trying, where what it was built for is longer than it takes."""

from __future__ import annotations

from collections.abc import Iterator

from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.searching.costs import affords
from veriformer.properties.engine.searching.reaching import longest_taken, refused_beyond, takes, tried_of
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.probes.findings import Finding, Question, a_stream

_ORDINARY = 5
"""Length of ordinary sequences: a subject that raises on these is not judged at all."""


def longest_sequence(bench: Workbench) -> Iterator[Finding]:
    """Find the length beyond which the forward raises, where that is shorter than what it was built for."""
    subject = bench.subject
    if subject.kind not in SEQUENCES:
        return
    if (declared := subject.fact("max_len")) is not None:
        yield from _shorter_than_declared(bench, declared)
        return
    stream = a_stream(bench)
    longest = min(bench.configs[0].max_len, tried_of(bench))
    if bench.pool.is_large and not affords(bench, 1, longest):
        return
    with bench.trying(stream.built) as tried:
        works = longest_taken(Stream(stream.case, tried), longest)
    if works < longest:
        text = f"sequences longer than {works} raise, though {longest} were asked for: a defect, or its longest?"
        asks = Question("numerics.finite", text, f"max_len={works}")
        yield Finding("max_len", works, f"sequences of {works} + 1 raise", asks=asks)


def shortest_sequence(bench: Workbench) -> Iterator[Finding]:
    """Find that short sequences raise, and where that ends: properties say that it is so, and this what to declare."""
    subject = bench.subject
    if subject.kind not in SEQUENCES or "min_length" in subject.declares:
        return
    stream = a_stream(bench)
    works = next((n for n in range(1, _ORDINARY) if takes(stream, n)), _ORDINARY)
    if works > 1:
        how = f"shorter sequences raise; declare min_length={works} if it takes none by design"
        yield Finding("min_length", works, how, is_fact=False)


def _shorter_than_declared(bench: Workbench, declared: int) -> Iterator[Finding]:
    """Find that sequences are refused which are no longer than what is declared."""
    works = refused_beyond(bench)
    if works:
        text = f"sequences longer than {works} raise, though max_len={declared} is declared: a defect, or its longest?"
        asks = Question("numerics.finite", text, f"max_len={works}")
        how = f"sequences of {works} + 1 raise"
        yield Finding("longest_sequence", works, how, is_fact=False, told=False, asks=asks)
