"""The twin: a model that is the textbook's, proved so by the reference Transformer with its weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from veriformer.properties.anatomy.flow import Flow, flow
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.families.decoding import cache_takes_mask, cut, with_cache
from veriformer.properties.subject.palette import LONG
from veriformer.properties.twin.carrying import Twin, twin_of
from veriformer.properties.twin.parts import MixedError, NumberError, PartedError, UnlikeError
from veriformer.properties.twin.roles import roles

APART = "apart from the twin"
"""Name of what is measured: the largest difference of an output, relative to the root mean square of the twin's."""


@holds(
    "twin.equal",
    statement="A model that is the textbook's gives what the reference Transformer gives with its weights.",
    formula="f(x) = f_reference(x; the same configuration, the same weights), with and without padding, and cached",
    source="Vaswani et al. 2017; Radford et al. 2019; Touvron et al. 2023: one model in its usual forms.",
    kinds=("encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=(
        needs_module,
        excludes_fact("prefix"),
        excludes_fact("quantised"),
    ),
    examples_factor=0.1,
    farthest=257,
)
def the_reference_gives_the_same(case: Case) -> None:
    """The roles of all parameters are told by what flows through them in one forward; the reference is built with them
    and must give the same outputs for other tokens and lengths, a far one among them, under padding, and through the
    cache where there is one. Where a model is otherwise, this does not apply, and the reason says where the two part;
    where every part is the textbook's and the outputs differ, that is a failure with structure="textbook" declared. A
    parameter that holds another number is carried into the twin: what is proved is that the model computes what the
    textbook does with its parameters, not that these are good.
    """
    seen = flow(case, goes_far=False)  # its parts are told on few positions, and held to on many
    with off_the_record(case), torch.no_grad():
        try:
            twin = _twin(case, seen)
            problem = _difference(seen, twin)
            told = f"every part is the textbook's, and the outputs differ by {problem:.3g} of their size"
        except PartedError as parting:
            declared, told = case.subject.fact("norm_placement"), str(parting)
            is_mixed = isinstance(parting, MixedError) and "branch-LN" in told  # of others a stream may be misread
            if is_mixed and declared in _DECLARED and case.subject.fact("structure") is None:
                _mixed(case, told, declared)
            if not isinstance(
                parting, NumberError | UnlikeError
            ):  # what the twin cannot read may be the textbook's all the same
                case.does_not_apply(f"no twin: {parting}")
            told, problem = str(parting), math.inf if isinstance(parting, NumberError) else 1.0
    if problem > 1e2 * seen.limit:
        _parted(case, told, is_number=problem == math.inf)
        return
    is_far = case.choices.get("reach") == LONG
    sequences = _far(case, seen, twin) if is_far else _near(case, seen, twin)
    is_other = case.subject.fact("structure") == "other"  # what padding means to it is its own
    for real in (None, *(() if is_other or is_far or len(sequences) > 1 else _sides(case, sequences[0]))):
        got = case.call(seen.built, *sequences, attention_mask=real)
        with off_the_record(case), torch.no_grad():
            expected = _given_by(twin, sequences, real).to(got.device, got.dtype)
        is_whole = real is None or case.subject.kind == "classifier"
        shown = torch.ones(got.shape[:1] if is_whole else real.shape, dtype=torch.bool) if is_whole else real
        how = "" if real is None else f" under {'right' if bool(real[0, 0]) else 'left'} padding"
        _measured(case, got[shown], expected[shown])
        case.close(
            got[shown],
            expected[shown],
            f"the outputs are not those of the textbook's model with the same weights{how} ({twin.told})",
            bound=_bound(case, seen, problem, expected),
            cause=lambda how=how: f"the model parts from the textbook's{how}",  # type: ignore[misc]
            asks=("structure", "other"),
        )
    if case.subject.cache is not None and not is_far and len(sequences) == 1:
        _cached(case, seen, twin, problem, sequences[0])
    case.say(f"equal to the textbook's model ({twin.told})")
    case.witness()


_DECLARED = {"pre": "in front of every sublayer", "post": "behind every sum"}


def _mixed(case: Case, told: str, declared: str) -> None:
    """Ask where sublayers of a layer have their norms in different places, though one is declared."""
    case.witness()
    case.require(
        False,
        f"norms do not stand where norm_placement={declared!r} has them, {_DECLARED[declared]}",
        got=told,
        expected=f"{declared}-LN in all sublayers",
        asks=("structure", "other"),
        cause=lambda: f"{told}; branch-LN is x + norm(f(x)): what a sublayer gives is normed, and then added",
    )


def _near(case: Case, seen: Flow, twin: Twin) -> list[Tensor]:
    """Return other sequences, three samples each: the source before the target."""
    most = min(seen.length + 4, twin.longest or 64, int(case.subject.fact("max_len", 64)), seen.built.config.max_len)
    # one token has no padding, and nothing before it to be kept
    return [_drawn(case, seen, 3, case.integer(label, 3, most)) for label in ("S", "T")[: len(seen.inputs)]]


def _far(case: Case, seen: Flow, twin: Twin) -> list[Tensor]:
    """Return one sample of a far length, the source as long as the target; tables may go wrong at their ends."""
    length = min(case.length(), twin.longest or seen.built.config.max_len)
    return [_drawn(case, seen, 1, length) for _ in seen.inputs]


def _cached(case: Case, seen: Flow, twin: Twin, problem: float, tokens: Tensor) -> None:
    """Hold what the subject decodes chunk by chunk to what the twin does, without padding and with it on the left."""
    left = torch.ones(tokens.shape, dtype=torch.bool, device=tokens.device)
    left[1:, 0] = False
    is_padded = cache_takes_mask(case.subject) is None and case.subject.fact("padding_side") in ("left", "both")
    for real in (None, left) if is_padded else (None,):
        chunks = cut(case, tokens, 0 if real is None else 1)
        got = with_cache(case, seen.built, chunks, real)
        with off_the_record(case), torch.no_grad():
            cache: Any = twin.module.new_cache()  # type: ignore[operator]
            sizes = [chunk.shape[1] for chunk in chunks]
            masks = [None] * len(chunks) if real is None else real.cpu().split(sizes, 1)
            made = [twin.module(x.cpu(), m, cache=cache) for x, m in zip(chunks, masks, strict=True)]
            expected = twin.head(torch.cat(made, 1)).to(got.device, got.dtype)
        got, expected = (got, expected) if real is None else (got[real], expected[real])
        _measured(case, got, expected)
        case.close(
            got,
            expected,
            f"the outputs through the cache are not those of the textbook's model with the same weights ({twin.told})",
            bound=_bound(case, seen, problem, expected),
            cause=lambda: "the model parts from the textbook's where it is decoded through its cache",
            asks=("structure", "other"),
        )


def _measured(case: Case, got: Tensor, expected: Tensor) -> None:
    """Tell how far the outputs are apart, relative to the twin's size: what a table of proved models shows."""
    if got.shape == expected.shape and got.numel():
        apart = float((got.detach().double() - expected.double()).abs().amax()) / size_of(expected)
        if math.isfinite(apart):
            case.measure(APART, apart)


def _bound(case: Case, seen: Flow, known: float, expected: Tensor) -> float:
    """Return how far outputs may be apart: by rounding, or as those that the model was taken apart on, since a model
    in float64 may have angles and tables made in float32.
    """
    made_in_single = min(32 * known, 4 * seen.limit)
    return max(case.tolerance(seen.built), made_in_single) * max(1.0, size_of(expected))


def _twin(case: Case, seen: Flow) -> Twin:
    result = seen.seen.output
    if result is None:
        raise PartedError("it gives no tensor")
    found = roles(
        seen.module, seen.seen, seen.inputs, seen.width, result,
        classifies=case.subject.kind == "classifier", encodes=bool(case.subject.fact("encodes_source", True)),
    )  # fmt: skip
    tables = [t.detach().cpu() for t in (*seen.module.parameters(), *seen.module.buffers()) if t.is_floating_point()]
    base = case.subject.fact("base")
    return twin_of(found, tables, seen.limit, None if base is None else float(base))


def _difference(seen: Flow, twin: Twin) -> float:
    """Return how far the twin is from the model on what it was taken apart on, relative to the size of the outputs."""
    assert seen.seen.output is not None
    got = seen.seen.output.double().cpu()
    expected = _given_by(twin, list(seen.inputs), None)
    if got.shape != expected.shape:
        raise PartedError(f"it gives {list(got.shape)}, where the textbook's gives {list(expected.shape)}")
    factor = float((got * expected).sum() / expected.square().sum())
    size = float(got.abs().amax())
    if abs(factor - 1) > 1e2 * seen.limit and float((got - factor * expected).abs().amax()) <= 1e2 * seen.limit * size:
        raise NumberError(f"the outputs are {factor:.6g} times those of the textbook's model")
    return float((got - expected).abs().amax() / size)


def _given_by(twin: Twin, sequences: list[Tensor], real: Tensor | None) -> Tensor:
    """Return what the twin gives for tokens `[B, T]` or embeddings `[B, T, D]`, float64."""
    given = [x.detach().cpu().double() if x.is_floating_point() else x.cpu() for x in sequences]
    hidden = twin.module(*given) if real is None else twin.module(*given, real.cpu())
    made: Tensor = twin.head(hidden)
    return made


def _drawn(case: Case, seen: Flow, samples: int, length: int) -> Tensor:
    if case.subject.takes_tokens:
        return case.tokens(samples, length)
    return case.normal(samples, length, seen.built.config.d_model, dtype=seen.built.dtype)


def _parted(case: Case, where: str, *, is_number: bool) -> None:
    """Say where the model and the textbook's part: a question where all is there, and a number is another one."""
    declared = case.subject.declares.get("structure")
    if declared == "textbook" or (is_number and declared != "other"):
        case.require(
            False,
            f"it is built as the textbook's model, and is not that: {where}",
            cause=lambda: where,
            asks=("structure", "other"),
        )
    case.does_not_apply(f"no twin: {where}")


def _sides(case: Case, tokens: Tensor) -> list[Tensor]:
    """Return masks of right and left padding, where the subject takes one and supports the side."""
    if not case.subject.takes_mask("padding") or tokens.shape[1] < 2:
        return []
    side = case.subject.fact("padding_side", "right")
    real = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
    real[1:, -1] = False
    return ([real] if side in ("right", "both") else []) + ([real.flip(1)] if side in ("left", "both") else [])
