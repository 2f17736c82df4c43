"""Padding: what stands under the padding mask, and how much of it, changes nothing at real positions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from veriformer.properties.causes.tracing.lines import Kept, apart
from veriformer.properties.causes.tracing.localize import where_it_enters
from veriformer.properties.causes.tracing.provenance import Crossing
from veriformer.properties.definitions.differences import size_of, worst_difference
from veriformer.properties.diagnosis.masks.hiding import hiding_cause, weighs_padding
from veriformer.properties.diagnosis.masks.placed import ones_cause
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_mask
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream, sides
from veriformer.properties.families.padding_gradients import padding_leaves_gradients_alone
from veriformer.properties.families.pooled_means import means_weigh_alike
from veriformer.properties.subject.paths import Path
from veriformer.properties.subject.subject import Subject

_PADDING = needs_mask("padding")
_SOURCE = "Vaswani et al. 2017, section 3.2.3: a masked position gets weight 0."


def _padded_on(side: str) -> object:
    def reason(subject: Subject) -> str | None:
        supported = subject.fact("padding_side", "both")
        if supported in (side, "both"):
            return None
        return f"the subject supports padding on the {supported}; declare padding_side='both' if it supports {side} too"

    return reason


class _Padded:
    """Sequences of different lengths in one batch, padded on one side."""

    def __init__(self, case: Case, side: str, *, low: int = 1) -> None:
        longest = case.length("T", low=2)
        self.side = side
        samples = case.batch(2, 2)
        self.real = [longest, case.integer("real", low, longest - 1)]
        self.real += [low + (2 * row + 1) % (longest - low) for row in range(2, samples)]
        self.stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject, masked=True)))
        self.x = self.stream.draw(samples, longest)
        self.mask = torch.zeros(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
        for row, count in enumerate(self.real):
            self.mask[row, slice(0, count) if side == "right" else slice(longest - count, None)] = True

    def real_outputs(self, output: Tensor) -> Tensor:
        """Return the outputs that count, `[N, *]`: those at real positions, or all pooled ones."""
        return output[self.mask] if self.stream.per_position else output

    def alone(self, row: int, path: Path) -> Tensor:
        """Return the outputs of one sample without its padding."""
        x = self.x[row : row + 1, self.mask[row]]
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        return self.stream(x, mask, path=path)[0]


def _leak_cause(padded: _Padded, path: Path) -> str | None:
    """Explain a leak of what is hidden: by numbers that are none, on a plain call, or else by path and place."""
    if told := _no_number(padded, path) or hiding_cause(padded.stream):
        return told
    told, has_line = _cause(padded, path)
    return told if has_line else hiding_cause(padded.stream, padded.side) or told


def _no_number(padded: _Padded, path: Path) -> str | None:
    """Say that padding makes NaN of real outputs, where the same sequences without padding have none."""
    stream, x = padded.stream, padded.x
    with torch.no_grad():
        hidden = padded.real_outputs(stream(x, padded.mask, path=path))
        whole = stream(x, torch.ones_like(padded.mask), path=path)
    if bool(hidden.isfinite().all()) or not bool(whole.isfinite().all()):
        return None
    most = x.shape[1] - min(padded.real)
    return (
        f"real outputs are NaN beside {most} padded positions, and without padding they are not: a query that sees "
        "padding alone has no finite score (its mask's constant is -inf, or is so in this dtype), and what it gives is "
        "read"
    )


def _cause(padded: _Padded, path: Path) -> tuple[str | None, bool]:
    """Tell whether the mask is ignored altogether, inverted, too weak, or leaks on this path alone; else the place.

    Returns:
        What is told, and whether it is more than a module's name.

    Asked on fresh positions, as many as no size of the model, the last two of them padding (or the first two): on one
    or two these cannot be told apart.
    """
    stream = padded.stream
    length = apart(6, stream.built.config)
    if length > min(stream.case.subject.fact("max_len", 64), stream.built.config.max_len):
        length = 6
    x = stream.draw(1, length)
    other = stream.other(x)
    shown = list(range(2, length) if _sides(stream.case.subject) == ("left",) else range(length - 2))
    mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    mask[:, shown] = True
    real, hides = _broad(mask, x), ~mask[0].cpu()

    def change(replaced: Tensor, way: Path = path) -> float:
        """Return how far the output that belongs to the first real position moves when positions are replaced."""
        after, before = stream(torch.where(replaced, other, x), mask, path=way), stream(x, mask, path=way)
        at = (slice(None), shown[0]) if stream.per_position else (slice(None),)
        return worst_difference(after[at], before[at], size_of(before)).error

    later = real & _broad(torch.arange(length, device=x.device)[None] > shown[0], x)
    with torch.no_grad():
        limit = stream.case.tolerance(stream.built)
        whole, hidden = stream(x, torch.ones_like(mask), path=path), stream(x, mask, path=path)
        lone = torch.zeros_like(mask)
        lone[:, shown[0]] = True  # a mask of other positions hides as little, where it is not read
        if all(worst_difference(y, whole, size_of(whole)).error <= limit for y in (hidden, stream(x, lone, path=path))):
            return (
                "the output with the mask equals the output without it: the padding mask is not applied on this path",
                True,
            )
        through = change(~real)
        if through <= limit:
            return None, False
        if not stream.case.subject.fact("causal") and stream.per_position and change(later) <= limit:
            return "other real positions do not matter and padded ones do: the mask is inverted", True
        plain = Path(mask="padded")
        if path != plain and change(~real, plain) <= limit:
            return f"the plain path is clean, padding leaks on this one alone ({path})", True
        where = where_it_enters(
            stream.built.module,
            lambda: stream(x, mask, path=path),
            lambda: stream(torch.where(~real, other, x), mask, path=path),
            lambda t: t[:, shown] if t.shape[:2] == x.shape[:2] else t if len(t) == 1 and t.ndim == 2 else None,
            limit,
            Kept({length: shown}),
            Crossing(1, hides[:, None] & ~hides[None], "position"),
        )
    is_weak = through < 1e-2 and weighs_padding(stream, x, mask) is not False
    weak = "a padded key gets a small weight instead of 0: the mask's constant is too weak; " if is_weak else ""
    return f"{weak}padding enters {where}" if where else weak.rstrip("; ") or None, bool(where and "at " in where)


def _broad(mask: Tensor, x: Tensor) -> Tensor:
    return mask[..., None] if x.ndim == 3 else mask


@holds(
    "padding.content-irrelevant",
    statement="What stands at padded positions does not change the outputs at real positions.",
    formula="x'_s = x_s where mask_s  =>  f(x', mask)_t = f(x, mask)_t where mask_t",
    source=_SOURCE,
    kinds=SEQUENCES,
    unless=_PADDING,
    sweeps_lengths=True,
    catches=("CM10", "CM13", "CM14", "PM07", "PM13", "PM14", "PM16", "PM17", "XA04"),
    in_half=True,
)
def padding_content_does_not_matter(case: Case) -> None:
    """A padded key has weight exactly 0 in every row. Padded embeddings are replaced by ones up to 10^4 times larger,
    since a mask constant that is merely small lets loud keys through. Outputs at padded positions are free.
    """
    padded = _Padded(case, case.choice("side", _sides(case.subject)))
    stream, x, mask = padded.stream, padded.x, padded.mask
    other = stream.other(x)
    if x.is_floating_point():
        other = other * case.loudness(1.0, 100.0, 10_000.0)
    changed = torch.where(_broad(mask, x), x, other)
    for path in case.paths(masks=("padded",), training=True, compiled=True):
        after, before = stream(changed, mask, path=path), stream(x, mask, path=path)
        kept, was = padded.real_outputs(after), padded.real_outputs(before)
        case.close(
            kept,
            was,
            "an output at a real position changed when padded positions were given other content",
            cause=lambda path=path: _leak_cause(padded, path),  # type: ignore[misc]
            in_single=lambda path=path: stream.in_single(  # type: ignore[misc]
                changed, x, mask, path, mask if stream.per_position else ...
            ),
        )
    padding_leaves_gradients_alone(case, stream, x, changed, mask, padded.real_outputs)
    case.witness()


def _sides(subject: Subject) -> tuple[str, ...]:
    side = subject.fact("padding_side", "right")
    return ("right", "left") if side == "both" else (side,)


def _amount(case: Case, side: str) -> None:
    padded = _Padded(case, side)
    for path in case.modes():
        batch = padded.stream(padded.x, padded.mask, path=path)
        pooled = not padded.stream.per_position
        for row in {0, 1, len(padded.real) - 1}:
            got = batch[row] if pooled else batch[row, padded.mask[row]]
            alone = padded.alone(row, path)
            case.close(
                got,
                alone,
                f"a sequence of {padded.real[row]} gives other outputs when padded on the {side} to {padded.real[0]}",
                bound=case.shifted_bound(padded.stream.built, got, alone) if side == "left" else None,
                cause=lambda: hiding_cause(padded.stream, side),
            )
    case.witness()


@holds(
    "padding.amount-irrelevant",
    statement="More padding on the right changes nothing at real positions.",
    formula="f([x, pad], [1, 0]) = f(x) at real positions",
    source=_SOURCE,
    kinds=SEQUENCES,
    unless=(_PADDING, _padded_on("right")),  # type: ignore[arg-type]
    sweeps_lengths=True,
    farthest=257,
    catches=("PM10", "PM13", "PM14", "PM16"),
    in_half=True,
)
def right_padding_changes_nothing(case: Case) -> None:
    """The sample alone, without padding, and in a batch that is padded to a longer one, gives the same outputs."""
    _amount(case, "right")


@holds(
    "padding.left",
    statement="More padding on the left changes nothing at real positions.",
    formula="f([pad, x], [0, 1]) = f(x) at real positions",
    source="Batched generation pads on the left; absolute positions then count real tokens alone.",
    kinds=SEQUENCES,
    level="extended",
    unless=(_PADDING, _padded_on("left"), excludes_fact("prefix")),  # type: ignore[arg-type]
    sweeps_lengths=True,
    farthest=257,
    catches=("PM08", "PM04"),
    asks=("padding_side", "right"),
    in_half=True,
)
def left_padding_changes_nothing(case: Case) -> None:
    """Absolute positions must follow the mask. Where they do not by design, declare padding_side='right'; undeclared, a
    difference is an open question.

    Relative positions are immune to a shift of all positions.
    """
    _amount(case, "left")


@holds(
    "padding.all-ones-mask",
    statement="A mask that hides nothing equals no mask.",
    formula="f(x, 1) = f(x)",
    source="Definition of a mask; a fast path or another kernel is often behind one of the two.",
    kinds=SEQUENCES,
    unless=_PADDING,
    sweeps_lengths=True,
    farthest=257,
    catches=("PM14", "PM17", "CM11"),
    in_half=True,
)
def a_mask_of_ones_is_no_mask(case: Case) -> None:
    """Walks grad, no_grad and inference mode and every backend."""
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject, masked=True)))
    x = stream.draw(case.batch(), case.length("T"))
    for path in case.paths(masks=("ones",)):
        masked = stream(x, path=path)
        # what autocast or a layout changes is no doing of the mask; on a path that was refused neither was there
        plain = Path(mode=path.mode, backend=path.backend) if case.was_refused else replace(path, mask="none")
        case.close(
            masked,
            stream(x, path=plain),
            "a mask of all True changes the output",
            cause=lambda: ones_cause(stream),
        )
    case.witness()


@holds(
    "padding.mask-matters",
    statement="Masking a real position changes the outputs, and an unmasked one matters.",
    formula="f(x, mask) != f(x, mask') where the masks differ",
    source="The other side of padding.content-irrelevant: a mask that is too strict, or not read at all.",
    kinds=SEQUENCES,
    unless=(_PADDING, excludes_fact("sparse")),
    catches=("PM11", "PM14", "CM17"),
    in_half=True,
)
def masking_a_position_matters(case: Case) -> None:
    """Hiding a position must show in the outputs of others that see it, and replacing all other visible inputs must
    show in the output of the one that is left. Six samples, so that one of them does not happen to look away.
    """
    length = case.length("T", low=3)
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject, masked=True)))
    x = stream.draw(6, length)
    side = _sides(case.subject)[0]
    everything = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    hidden = everything.clone()
    hidden[:, 0 if side == "left" else length - 1] = False
    watched = length - 1 if side == "left" else length - 2  # the last visible position sees all others in any model
    kept = (torch.arange(length, device=x.device) == watched).expand(x.shape[:2])
    changed = torch.where(_broad(kept, x), x, stream.other(x))
    others = slice(1, None) if side == "left" else slice(None, -1)
    hides_the_past = side == "left" or not case.subject.fact("causal") or not stream.per_position
    for path in case.modes():
        partly = stream(x, hidden, path=path)
        if hides_the_past:
            whole = stream(x, everything, path=path)
            case.differs(
                partly[:, others] if stream.per_position else partly,
                whole[:, others] if stream.per_position else whole,
                "hiding a real position under the mask changes no output elsewhere: the mask is not read",
                cause=lambda: hiding_cause(stream),
                asks=("sparse", True),
            )
        moved = stream(changed, hidden, path=path)
        case.differs(
            moved[:, watched] if stream.per_position else moved,
            partly[:, watched] if stream.per_position else partly,
            "replacing inputs that the mask leaves visible changes nothing: the mask hides too much",
            cause=lambda: hiding_cause(stream),
            asks=("sparse", True),
        )
    case.witness()


@holds(
    "padding.fully-padded-row",
    statement="A sample without one real position leaves the others as they are, finite, with finite gradients.",
    formula="f([x, y], [mask, 0])_0 = f(x, mask); |d f / d parameters| < inf",
    source="PyTorch issue 41508 and many after it: softmax over an empty set is 0/0.",
    kinds=SEQUENCES,
    unless=_PADDING,
    catches=("PM01", "PM02"),
    in_half=True,
)
def an_empty_sample_harms_no_other(case: Case) -> None:
    """Nothing connects the samples of a batch. What the empty sample itself gives (zeros, a mean, NaN) is a convention,
    judged only where `empty_row` declares zeros; but the NaN must not reach a parameter through samples that count.
    """
    length = case.length("T", low=2)
    stream = Stream(case, case.built(), side=case.choice("stream", sides(case.subject, masked=True)))
    x = stream.draw(2, length)
    mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    ordinary = mask.clone()
    mask[1] = False
    if case.subject.fact("empty_row") == "error":
        case.reject("an empty row is declared to raise")
    for path in case.modes():
        output = stream(x, mask, path=path)
        case.finite(output[0], "a sample became NaN because another sample of the batch is all padding")
        case.close(
            output[0],
            stream(x, ordinary, path=path)[0],
            "a sample changed because another sample of the batch is all padding",
            cause=lambda: hiding_cause(stream),
        )
    case.path = str(Path(mask="padded"))
    if case.subject.fact("empty_row") in ("zeros", "mean"):
        case.finite(stream(x, mask), "the sample that is all padding gives NaN, though empty_row declares otherwise")
    if x.is_floating_point() and x.dtype != torch.float16:  # gradients overflow there: losses are scaled for that
        leaf = x.detach().clone().requires_grad_()
        gradient = torch.autograd.grad(stream(leaf, mask)[0].sum(), leaf)[0]
        case.finite(gradient[0], "a sample's gradient became NaN because another sample of the batch is all padding")
    case.path = ""
    case.witness()


@holds(
    "padding.pooling",
    statement="A pooled output ignores padding.",
    formula="pool(f([x, pad], [1, 0])) = pool(f(x))",
    source="Mean pooling divides by the number of real tokens; max and class token never read padding.",
    kinds=("classifier",),
    unless=_PADDING,
    sweeps_lengths=True,
    farthest=257,
    catches=("PM10", "PM11"),
    in_half=True,
)
def pooling_ignores_padding(case: Case) -> None:
    """Judged on sequences of one repeated token too: there a mean over real and padded positions differs from the mean
    over real ones even where attention masks correctly. A mean weighs all real positions alike.
    """
    padded = _Padded(case, case.choice("side", _sides(case.subject)))
    if case.flag("constant"):
        padded.x = padded.x[:, :1].repeat(1, padded.x.shape[1], *(1,) * (padded.x.ndim - 2))
        padded.x = torch.where(_broad(padded.mask, padded.x), padded.x, padded.stream.other(padded.x))
    pooled = padded.stream(padded.x, padded.mask)
    alone = padded.alone(1, Path())
    side = "right" if bool(padded.mask[1, 0]) else "left"
    case.close(pooled[1], alone, "the pooled output changes with the amount of padding",
               cause=lambda: hiding_cause(padded.stream, side))  # fmt: skip
    means_weigh_alike(case, padded.stream)
    case.witness()
