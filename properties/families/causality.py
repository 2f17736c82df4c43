"""Causality: output t depends on inputs 0..t, on all of them, and on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.influence_maps import (
    causal_region,
    declared_region,
    gap_cause,
    leak_cause,
    map_of,
    measured_map,
)
from veriformer.properties.causes.statistics_over_time import norm_over_time
from veriformer.properties.causes.tracing.lines import Kept, apart
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.causes.tracing.provenance import Crossing
from veriformer.properties.causes.undifferentiated import without_gradient
from veriformer.properties.diagnosis.masks.inside import all_masks_are_right
from veriformer.properties.diagnosis.prefixes import length_enters
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_fact
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import PER_POSITION, Stream
from veriformer.properties.engine.violations import InfluenceMap
from veriformer.properties.families.causality_far import the_window_slides
from veriformer.properties.families.token_rows import every_token_counts
from veriformer.properties.probes.influence import by_substitution
from veriformer.properties.subject.paths import DEFAULT, Path

_CAUSAL = needs_fact("causal", True)
MAP_LENGTH = 6
MOST_BACKWARDS = 130
_LEAKS = ("CM01", "CM04", "CM05", "CM10", "CM13", "CM14", "CM17", "CM19", "CM20", "HD02")


def _start(case: Case, *, low: int = 1, batch: int | None = None) -> tuple[Stream, int, int]:
    """Draw sizes and a model; return the stream, T and B."""
    length = case.length("T", low=low)
    size = case.batch() if batch is None else batch
    return Stream(case, case.built()), length, size


def _mask(stream: Stream, x: Tensor, path: Path, real: int) -> Tensor | None:
    """Return the attention mask of a path: right padding from position `real` on."""
    if path.mask != "padded":
        return None
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, real:] = False
    return mask


def _permitted(case: Case, length: int) -> Tensor:
    """Return what an output may see: through N layers a window reaches N times as far, so of stacks it says nothing."""
    one_layer = case.subject.kind in ("self_attention", "layer")
    return (
        declared_region(case.subject, length) if one_layer else causal_region(length, None, case.subject.fact("prefix"))
    )


@holds(
    "causality.no-future-influence",
    statement="Replacing later inputs leaves earlier outputs unchanged, on every path.",
    formula="x'_s = x_s for s <= t  =>  f(x')_s = f(x)_s for s <= t",
    source="Vaswani et al. 2017, section 3.1 (masking keeps the decoder auto-regressive).",
    kinds=PER_POSITION,
    unless=_CAUSAL,
    sweeps_lengths=True,
    catches=_LEAKS,
    in_half=True,
)
def later_inputs_do_not_reach_earlier_outputs(case: Case) -> None:
    """A masked score is -inf, its weight exactly 0; all else acts on one position at a time.

    Walks: no mask, all-ones mask and padding; grad, no_grad and inference mode; every backend; train mode where the
    model is deterministic there. Embeddings are replaced by ones a hundred times larger half of the time, so that
    a weight that is only small shows. Does not apply inside a declared prefix.
    """
    stream, length, batch = _start(case, low=2)
    first = case.integer("t", 1, length - 1)  # inputs from here on are replaced
    first = max(first, min(case.subject.fact("prefix", 0), length - 1))
    if first < case.subject.fact("prefix", 0):
        case.reject("the whole sequence is prefix")
    x = stream.draw(batch, length)
    changed = x.clone()
    loud = case.loudness(1.0, 100.0) if x.is_floating_point() else 1
    changed[:, first:] = (stream.other(x) * loud)[:, first:]
    real = case.integer("real", first, length)
    for path in case.paths(masks=("none", "ones", "padded"), training=True, compiled=True):
        mask = _mask(stream, x, path, real)
        after, before = stream(changed, mask, path=path), stream(x, mask, path=path)
        show = _Map(case, stream, path)
        case.close(
            after[:, :first],
            before[:, :first],
            f"the outputs before position {first} changed when inputs from position {first} on were replaced",
            cause=show.leak,
            influence=show,
            in_single=lambda mask=mask, path=path: stream.in_single(  # type: ignore[misc]
                changed, x, mask, path, (slice(None), slice(first))
            ),
        )
        if bool((after[:, first:] != before[:, first:]).any()):
            case.witness()


class _Map:
    """What reaches what on one path, measured when asked for: on enough positions to tell one step ahead from all."""

    def __init__(self, case: Case, stream: Stream, path: Path) -> None:
        self.case, self.stream, self.path = case, stream, path
        self.length = max(MAP_LENGTH, case.subject.fact("window", 0) + 2, case.subject.fact("prefix", 0) + 3)
        self.must, self.allowed = declared_region(case.subject, self.length), _permitted(case, self.length)

    def _measured(self, path: Path) -> Tensor:
        x = self.stream.draw(1, self.length)
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if path.mask != "none" else None
        return measured_map(self.case, self.stream, x, mask, path)

    def __call__(self) -> InfluenceMap:
        """Return the map."""
        return map_of(self._measured(self.path), self.allowed)

    def leak(self) -> str | None:
        """Name the likely cause of a leak, and whether it is on this path alone."""
        layers, sinks = self.stream.built.config.num_layers, self.case.subject.fact("sink_tokens", 0)
        cause = leak_cause(self._measured(self.path), self.allowed, layers, sinks) or self._chosen()
        if cause and ":" in cause and "mask" in cause and answer_to(lambda: all_masks_are_right(self.case)):
            cause = f"{cause.partition(':')[0]}, and not through attention: all its masks hide the later keys"
        if cause and (norm := self._normed()):
            return norm
        where = self._where() if cause else None
        if cause and where:
            cause = f"{cause.partition(':')[0] if 'every later' in cause else cause}; it enters {where}"
        if cause is None or self.path == DEFAULT or leak_cause(self._measured(DEFAULT), self.allowed) is not None:
            return cause
        return f"{cause}; the plain path is clean, only this one leaks ({self.path})"

    def _chosen(self) -> str | None:
        """Say that later inputs decide what is chosen for earlier outputs, where no gradient passes."""
        stream, batches = self.stream, range(4)
        maps = [by_substitution(stream, stream.draw(1, self.length), None, self.path) for _ in batches]
        if leak_cause(torch.stack(maps).amax(0), self.allowed) is None:
            return None
        return without_gradient(lambda: stream(stream.draw(1, self.length)))

    def _normed(self) -> str | None:
        length = apart(self.length, self.stream.built.config)
        x = self.stream.draw(1, length)
        return norm_over_time(self.stream.built.module, lambda: self.stream(x, path=self.path), length)

    def _where(self) -> str | None:
        """Name the module in which later inputs reach earlier outputs."""
        stream = self.stream
        length = apart(self.length, stream.built.config)
        x, last = stream.draw(1, length), length // 2
        for cut in (last, *range(last + 1, length), *range(1, last)):
            other = x.clone()
            other[:, cut:] = stream.other(x)[:, cut:]
            if where := self._where_behind(x, other, cut):
                return where
        return None

    def _where_behind(self, x: Tensor, other: Tensor, cut: int) -> str | None:
        stream, path, length = self.stream, self.path, x.shape[1]
        return where_it_enters(
            stream.built.module, lambda: stream(x, path=path), lambda: stream(other, path=path),
            lambda t: t[:, :cut] if t.shape[:2] == x.shape[:2] else None, self.case.tolerance(stream.built),
            Kept({length: list(range(cut))}),
            Crossing(1, ~causal_region(length, None, self.case.subject.fact("prefix")).T, "position"),
        )  # fmt: skip

    def gap(self) -> str | None:
        """Name the likely cause of a gap."""
        return gap_cause(self._measured(self.path), self.must)


def leak_of(case: Case, built: Built) -> str | None:
    """Name the likely cause of a leak on the plain path, for failures that follow from one; None without a leak."""
    return _Map(case, Stream(case, built), DEFAULT).leak()


@holds(
    "causality.no-future-gradient",
    statement="The gradient of an output is exactly zero for later inputs, and not zero for itself and earlier ones.",
    formula="d f(x)_t / d x_s = 0  <=>  s > t",
    source="Vaswani et al. 2017, section 3.1; the derivative of the statement.",
    kinds=PER_POSITION,
    requires=("batch.independence",),
    unless=_CAUSAL,
    sweeps_lengths=True,
    farthest=0,  # a backward for each output
    catches=(*_LEAKS, "CM02"),
    in_half=True,
)
def gradients_stop_at_the_present(case: Case) -> None:
    """The weight of a masked key is exactly 0, so nothing flows back through it: zero to the bit, in any dtype.

    On and below the diagonal (inside a declared window) a gradient must flow: a mask that is too strict is as wrong.
    Holds in train mode with dropout too, for the zeros. Where gradients cannot be had, inputs are replaced one by one.
    """
    stream, length, _ = _start(case, batch=1)
    if length > MOST_BACKWARDS:
        case.reject("a backward for each output of a sequence so long costs too much; its inputs are replaced instead")
    x = stream.draw(1, length)
    allowed, permitted = declared_region(case.subject, length), _permitted(case, length)
    for path in case.paths(masks=("none", "ones"), modes=("grad",)):
        influence = stream.influence(x, path=path)
        substituted = influence is None
        influence = by_substitution(stream, x, None, path) if influence is None else influence.cpu()
        _no_leak(case, stream, influence, permitted, path)
        if case.is_in_half or (substituted and path.autocast):
            continue  # what half precision cannot tell from rounding, or from 0, counts as no influence there
        _no_gap(case, stream, _without_chance(stream, influence, allowed, path), allowed, path)
    if not case.subject.is_functional and case.built(dtype=stream.built.dtype).config.dropout > 0:
        training = Path(training=True)
        case.path = str(training)
        influence = stream.influence(x, path=training)
        if influence is not None:
            _no_leak(case, stream, influence.cpu(), permitted, training)
        case.path = ""
    case.witness()


def _no_leak(case: Case, stream: Stream, influence: Tensor, allowed: Tensor, path: Path) -> None:
    illegal = torch.where(allowed, torch.zeros_like(influence), influence)
    case.exact(
        illegal,
        torch.zeros_like(illegal),
        "an output has a gradient with respect to an input that it must not see",
        cause=_Map(case, stream, path).leak,
        influence=_Map(case, stream, path),
    )


def _without_chance(stream: Stream, influence: Tensor, allowed: Tensor, path: Path) -> Tensor:
    """Return the influence, largest over four more inputs if a place is empty: one weight may underflow."""
    if not bool(((influence == 0) & allowed).any()):
        return influence
    for _ in range(4):
        more = stream.influence(stream.draw(1, len(allowed)), path=path)
        influence = influence if more is None else torch.maximum(influence, more.cpu())
    return influence


def _no_gap(case: Case, stream: Stream, influence: Tensor, allowed: Tensor, path: Path) -> None:
    if case.subject.fact("sparse"):
        return
    missing = (influence == 0) & allowed
    asks: tuple[str, Any] = ("sparse", True)
    if bool(missing.any()):
        reached = by_substitution(stream, stream.draw(1, len(allowed)), None, path)
        asks = asks if bool((reached[missing] == 0).any()) else ("quantised", True)  # it matters, and has no gradient
    case.require(
        ~missing.any(),
        "an output does not depend on an input that it must see",
        got=f"no influence at {int(missing.sum())} of {int(allowed.sum())} permitted places",
        expected="some influence at each of them",
        cause=lambda: _Map(case, stream, path).gap() or gap_cause(influence, allowed),
        influence=_Map(case, stream, path),
        asks=asks,
    )


@holds(
    "causality.prefix-consistency",
    statement="The outputs for a prefix are the first outputs for the whole sequence.",
    formula="f(x[:t]) = f(x)[:t]",
    source="Consequence of causality and of the independence of length; the premise of cached decoding.",
    kinds=PER_POSITION,
    unless=(_CAUSAL, excludes_fact("prefix")),
    sweeps_lengths=True,
    farthest=257,
    catches=(*_LEAKS, "RP11"),
    in_half=True,
)
def a_prefix_gives_the_first_outputs(case: Case) -> None:
    """Nothing after t reaches outputs up to t, so cutting the sequence there changes nothing.

    Dynamic rotary scaling depends on the length beyond its trained one: declare `max_len` and lengths stay below it.
    """
    stream, length, batch = _start(case, low=2)
    cut = case.integer("t", 1, length - 1)
    x = stream.draw(batch, length)
    for path in case.paths(masks=("none", "ones")):
        short, whole = stream(x[:, :cut], path=path), stream(x, path=path)
        show = _Map(case, stream, path)
        case.close(
            short,
            whole[:, :cut],
            f"the outputs for the first {cut} inputs change when the sequence goes on after them",
            cause=lambda show=show, path=path: show.leak() or length_enters(case, stream, x, cut, path),  # type: ignore[misc]
            influence=show,
        )
    case.witness()


@holds(
    "causality.first-token",
    statement="The first output is a function of the first input alone.",
    formula="f(x)_0 = f(x_0)_0",
    source="Causality at t = 0: attention over one key is the identity on its value.",
    kinds=PER_POSITION,
    level="extended",
    requires=("batch.independence",),
    unless=(_CAUSAL, excludes_fact("prefix")),
    catches=("CM01", "CM02", "CM19"),
    in_half=True,
)
def the_first_output_sees_the_first_input_alone(case: Case) -> None:
    """Softmax over a single key is 1, whatever its score; so the rest of the sequence cannot matter. A batch of
    sequences that share the first input and nothing else gives one and the same first output.
    """
    stream, length, _ = _start(case, low=2, batch=1)
    x = stream.draw(4, length)
    x[1:, 0] = x[0, 0]
    for path in case.paths(masks=("none", "ones")):
        first = stream(x, path=path)[:, 0]
        case.close(
            first[1:],
            first[:1].repeat(3, 1),
            "sequences with the same first input give different first outputs",
            cause=_Map(case, stream, path).leak,
        )
    alone = stream(x[:1, :1])
    case.close(stream(x)[:1, 0], alone[:, 0], "the first output differs from that of the first input alone")
    case.differs(stream(stream.other(x[:1, :1])), alone, "the first output does not depend on the first input")
    every_token_counts(case, stream)
    case.witness()


@holds(
    "causality.window",
    statement="A sliding window of w reaches back exactly w - 1 steps in one layer.",
    formula="d f(x)_t / d x_s != 0  <=>  t - w < s <= t",
    source="Beltagy et al. 2020, section 3.1; the convention (w counts the token itself) is declared.",
    kinds=("self_attention", "layer"),
    level="extended",
    unless=(_CAUSAL, needs_fact("window")),
    sweeps_lengths=True,
    catches=("CM16", "KV08"),
    in_half=True,
)
def the_window_has_the_declared_width(case: Case) -> None:
    """Stated for one layer: N layers reach N (w - 1) steps back. Lengths pass the window by one and by more; in long
    sequences, where a backward for each output costs too much, some inputs are replaced.
    """
    window = int(case.subject.fact("window"))
    stream, length, _ = _start(case, batch=1)
    allowed = causal_region(length, window, None, case.subject.fact("sink_tokens", 0))
    if case.reaches or length > MOST_BACKWARDS:
        the_window_slides(case, stream, allowed)
        if length > window:
            case.witness()
        return
    x = stream.draw(1, length)
    for path in case.paths(masks=("none", "ones"), modes=("grad",)):
        influence = stream.influence(x, path=path)
        influence = by_substitution(stream, x, None, path) if influence is None else influence.cpu()
        _no_leak(case, stream, influence, allowed, path)
        if not case.is_in_half:
            _no_gap(case, stream, _without_chance(stream, influence, allowed, path), allowed, path)
    if length > window or length < window:
        case.witness()


@holds(
    "causality.declared-bidirectional-is",
    statement="A subject that declares itself not causal does see later inputs.",
    formula="d f(x)_t / d x_s != 0 for some s > t",
    source="The inverse of the causal properties: a declared fact is verified, not believed.",
    kinds=PER_POSITION,
    unless=(needs_fact("causal", False), excludes_fact("prefix")),
    catches=("CM17",),
    in_half=True,
)
def a_bidirectional_subject_sees_the_future(case: Case) -> None:
    """Every output of an encoder reaches every input (a declared window limits it)."""
    stream, length, _ = _start(case, low=2, batch=6)
    x = stream.draw(6, length)  # six samples, so that one of them does not happen to look away
    changed, last = x.clone(), length - 1
    if case.subject.fact("sparse"):
        if length < 4:
            case.reject("of so few positions a sparse pattern may join none")
        last = 1
    changed[:, last:] = stream.other(x)[:, last:]
    for path in case.paths(masks=("none", "ones")):
        case.differs(
            stream(changed, path=path)[:, :last],
            stream(x, path=path)[:, :last],
            "no earlier output changed when the last input was replaced: the subject behaves causally",
        )
    case.witness()
