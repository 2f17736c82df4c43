"""Attention at realistic sizes: what kernels that work in tiles get wrong where there is more than one tile."""

from __future__ import annotations

from collections.abc import Iterator

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.causes.attention import attention_cause
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.diagnosis.kernels.tiling import PARTS, Judged, Situation, Tiling, planned
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.subject.paths import DEFAULT, Path

_WORK = 3e10
"""Multiplications of one case: a kernel of Python loops, whose steps count as many, is called in few situations."""


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
    """A kernel that works in tiles of 16 to 256 has one of them at the lengths of other properties: how tiles are
    joined is seen at several. Each head of a sample has scores of another course (`profiled`): later tiles have larger
    maxima, or smaller; one key stands beyond the last full tile, or many; masks empty tiles and begin inside of one;
    there are as many queries as keys, fewer and more. What a kernel refuses by raising it is not held to. How much
    work a situation is follows from its sizes and the operations that small calls take, not from a clock; what would be
    too much is left out, which the report says.
    """
    built = case.built()
    tiling = Tiling(case, built)
    left, compared, beyond = _WORK, 0, []
    for plain in planned(case):
        s = tiling.fitted(plain)
        if s is None or (s.causal and s.queries != s.keys and not _aligned(case, tiling)):
            continue
        with off_the_record(case):
            foreseen = tiling.foreseen(s)
        if foreseen > left:
            beyond.append(s)
            continue
        left -= foreseen
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
        case.does_not_apply("it refuses all of these lengths, or loops over them in many small steps")
    if beyond:
        least = min(beyond, key=lambda s: s.queries * s.keys)
        case.leave_out(
            f"{len(beyond)} kinds of calls, from {least.queries} queries and {least.keys} keys on: too many small steps"
        )
    case.witness()


def _aligned(case: Case, tiling: Tiling) -> str:
    with off_the_record(case):
        return tiling.alignment


def _paths(case: Case, s: Situation) -> Iterator[Path]:
    """Gradients by default, other calls without a graph; the backends at two of the longer lengths."""
    yield DEFAULT if s.gradients else Path(mode="no_grad")
    if s.gradients and not s.masked and not s.groups and s.queries > 100:
        for backend in case.subject.backends:
            yield Path(backend=backend)


def _compare(case: Case, s: Situation, judged: Judged, tiling: Tiling) -> None:
    shape = judged.inputs[0].shape[:3] + judged.inputs[2].shape[-1:]
    for part, (got, expected, bound) in zip(PARTS, judged.pairs, strict=False):
        case.close(
            got,
            expected,
            f"{s} the {part} is not that of softmax(q k^T * scale) v",
            bound=bound,
            cause=(lambda got=got: attention_cause(got, *judged.inputs, tiling.scale(s), judged.allow))  # type: ignore[misc]
            if part == PARTS[0] and got.shape == shape
            else None,
        )
