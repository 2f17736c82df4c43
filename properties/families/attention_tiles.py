"""Attention at realistic sizes: what kernels that work in tiles get wrong where there is more than one tile."""

from __future__ import annotations

import time
from collections.abc import Iterator

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.tiling import Judged, Situation, Tiling
from veriformer.properties.subject.paths import DEFAULT, Path

_SECONDS = 4.0
"""What one case may spend: a kernel of Python loops is called in the shorter situations alone."""

_PARTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")


@holds(
    "attention.tiles",
    statement="Values and gradients equal the float64 definition at realistic sizes.",
    formula="o = softmax(q k^T * scale) v, and dq, dk, dv of <w, o>, at T and S of 1 to 1000, apart and alike",
    source="Dao et al. 2022, algorithm 1 and appendix B; Milakov & Gimelshein 2018, algorithm 3.",
    kinds=("attention",),
    unless=(
        excludes_fact("sink"),
        excludes_fact("query_key_norm"),
        excludes_fact("sparse"),
        excludes_fact("prefix"),
        excludes_fact("positions", "rotary", "alibi", "t5", "relative", "other", "sinusoidal", "learned"),
    ),
    examples_factor=0.2,
    catches=("BK02", "CM08"),
)
def long_sequences_follow_the_definition(case: Case) -> None:
    """A kernel that works in tiles of 16 to 256 has one of them at the lengths of other properties: how tiles are joined
    is seen at several. Each head of a sample has scores of another course (`profiled`): later tiles have larger maxima,
    or smaller; one key beyond the last full tile, and many; masks empty tiles and begin inside of one; causal masks with
    as many queries as keys, fewer and more. What a kernel refuses by raising it is not held to, and one that would take
    seconds is called in the shorter situations alone.
    """
    built = case.built()
    tiling = Tiling(case, built)
    started, compared = time.perf_counter(), 0
    for planned in _plan(case):
        s = tiling.fitted(planned)
        if s is None or (s.causal and s.queries != s.keys and not _aligned(case, tiling)):
            continue
        with off_the_record(case):
            foreseen = tiling.foreseen(s)
        if time.perf_counter() - started + foreseen > _SECONDS:
            continue
        for path in _paths(case, s):
            case.path = str(path)
            try:
                judged = tiling.judge(s, path=path)
            except SubjectError:
                continue
            compared += 1
            _compare(case, s, judged, tiling)
        case.path = ""
    if not compared:
        case.does_not_apply("it refuses all of these lengths, or takes seconds for them")
    case.witness()


def _aligned(case: Case, tiling: Tiling) -> str:
    with off_the_record(case):
        return tiling.alignment


def _paths(case: Case, s: Situation) -> Iterator[Path]:
    """Gradients by default, other calls without a graph; the backends where there is nothing else to tell."""
    yield DEFAULT if s.gradients else Path(mode="no_grad")
    if s.gradients and not s.masked and not s.groups:
        for backend in case.subject.backends:
            yield Path(backend=backend)


def _compare(case: Case, s: Situation, judged: Judged, tiling: Tiling) -> None:
    for part, (got, expected, bound) in zip(_PARTS, judged.pairs, strict=False):
        case.close(
            got,
            expected,
            f"{s} the {part} is not that of softmax(q k^T * scale) v",
            bound=bound,
            cause=lambda: attention_cause(
                judged.pairs[0][0], *judged.inputs, tiling.scale(s), judged.allow
            ),
        )  # fmt: skip


def _plan(case: Case) -> Iterator[Situation]:
    """Yield situations, short ones first; lengths lie one beyond a power of two in the first case, near it in others."""
    subject, near = case.subject, case.choice("near", (0, -1, 1))
    width = case.choice("K", (32, 64, 48, 80, 128))
    masks = subject.takes_mask("pairwise") or subject.takes_mask("padding")
    causal = subject.accepts("causal")
    if subject.fact("window"):
        causal, free = causal or bool(subject.fact("causal")), False
    else:
        free = True
    if free:
        yield Situation("", 2, 2, 18, 35 + near, 161, gradients=True)
        yield Situation("8 samples of 8 heads", 8, 8, 17, 33 + near, 16)
        yield Situation("", 2, 2, 129 + near, 257 + near, width, gradients=True)
        if subject.fact("grouped_queries"):
            yield Situation("3 heads to a key-value head", 1, 6, 65, 130 + near, width, groups=2, gradients=True)
    if masks and free:
        yield Situation("a mask", 3, 2, 140, 300 + near, width, masked=True, gradients=True)
    if causal:
        yield Situation("causal=True", 1, 3, 193 + near, 193 + near, width + 1, causal=True, gradients=True)
        yield Situation("causal=True", 1, 2, 70, 259 + near, width, causal=True, gradients=True)
        yield Situation("causal=True", 1, 2, 150, 70 + near, width, causal=True)
        if masks:
            yield Situation("a mask beside causal=True", 3, 1, 161, 161, width, masked=True, causal=True)
    if free:
        yield Situation("", 2, 4, 1, 1000 + near, width)
        yield Situation("", 1, 2, 128, 256, 2 * width)
        yield Situation("", 1, 1, 300, 1000 + near, width)
