"""Derivatives with one thing wrong, as backwards written by hand have been seen to have it, and which one is given.

A wrong formula is named only if the right one is the derivative and the wrong one is what the subject gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from veriformer.properties.definitions.attention import attention_oracle
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.definitions.losses import loss_oracle
from veriformer.properties.diagnosis.derivatives.differentiating import Setting
from veriformer.properties.diagnosis.derivatives.soft_caps import wrong_cap_slopes
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.facts import attention_scale

Wrong = Iterator[tuple[str, Tensor]]


def told_by_formula(case: Case, made: Setting, name: str, gradient: Tensor, kind: str = "") -> str | None:
    """Return the words of the wrong formula that gives the gradient of one leaf, or None.

    Args:
        case: of the subject.
        made: how it, or a part of it, is called.
        name: of the leaf.
        gradient: that the subject gives.
        kind: of the part; that of the subject if empty.
    """
    formulas = {"attention": _attention, "norm": _norm, "softmax": _softmax, "loss": _loss, "rotary": _rotary}
    maker = formulas.get(kind or case.subject.kind)
    if maker is None:
        return None
    right, wrong = maker(case, made, name)
    if right is None or right.shape != gradient.shape:
        return None
    direction = made.direction(name, 3)
    if (
        abs(float((right * direction).sum()) - made.quotient({name: direction}))
        > 1e-4 * size_of(right) * direction.norm()
    ):
        return None  # the output is not that of the formula
    if _same(gradient, right):
        return None
    fits = [words for words, guess in wrong if guess.shape == gradient.shape and _same(gradient, guess)]
    return fits[0] if fits else None


def output_is_right(case: Case, made: Setting) -> bool:
    """Whether an output is that of the definition, where there is one; True where there is none, or in train mode."""
    kind, fact = case.subject.kind, case.subject.fact
    args = [x.detach() for x in made.args]
    if made.is_training or fact("sink") or fact("query_key_norm"):
        return True
    if kind == "attention":
        width, heads = args[0].shape[-1], args[0].shape[1]
        scale = attention_scale(fact("attention_scale"), width, width * heads)
        wanted = attention_oracle(*args, scale=scale, allow=made.allow, soft_cap=fact("soft_cap"))
    elif kind == "softmax":
        wanted = args[0].softmax(-1)
    elif kind == "loss" and not fact("shifts_labels"):
        eps, z = (float(fact(f, 0.0)) for f in ("label_smoothing", "z_loss"))
        wanted = loss_oracle(args[0], args[1], eps, int(fact("ignore_index", -100)), z)
    else:
        return True
    got = made.output()
    return float((got - wanted.to(got.device).view(got.shape)).abs().max()) <= 1e-6 * max(size_of(wanted), 1e-9)


def _same(one: Tensor, two: Tensor) -> bool:
    return float((one - two).abs().max()) <= 1e-5 * max(size_of(two), 1e-9)


@dataclass
class _Backward:
    """What the backward of attention is made of, for as many key-value heads as query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float
    allow: Tensor | None
    cap: float | None = None

    def __post_init__(self) -> None:
        self.scores = self.raw = self.q @ self.k.mT * self.scale
        self.slope = torch.ones_like(self.raw)
        if self.cap:
            self.raw = self.cap * (self.scores / self.cap).tanh()
            self.slope = 1 - (self.raw / self.cap).square()
        shown = self.raw if self.allow is None else self.raw.masked_fill(~self.allow, -torch.inf)
        self.p = shown.softmax(-1).nan_to_num(0.0)
        self.lse = shown.logsumexp(-1, keepdim=True)
        self.dp = self.g @ self.v.mT
        self.delta = (self.dp * self.p).sum(-1, keepdim=True)
        self.ds = self.p * (self.dp - self.delta)


def _attention(case: Case, made: Setting, name: str) -> tuple[Tensor | None, Wrong]:
    if any(case.subject.fact(f) for f in ("sink", "query_key_norm")) or made.is_training:
        return None, iter(())
    q, k, v = (x.detach() for x in list(made.leaves.values())[:3])
    repeats = q.shape[1] // k.shape[1]
    scale = attention_scale(case.subject.fact("attention_scale"), q.shape[-1], q.shape[-1] * q.shape[1])
    g = made.weight(made.output())
    cap = case.subject.fact("soft_cap")
    b = _Backward(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), g, scale, made.allow, cap)
    right = _of(b, name)
    if name == "the queries" or repeats == 1:
        return right, _wrong_attention(b, name)
    return _grouped(right, repeats), _wrong_groups(b, name, repeats)


def _of(b: _Backward, name: str, ds: Tensor | None = None, p: Tensor | None = None) -> Tensor:
    """Return one of the three gradients, from other derivatives of the scores or other weights if these are given."""
    if name == "the values":
        return (b.p if p is None else p).mT @ b.g
    used = (b.ds if ds is None else ds) * b.slope
    return b.scale * (used @ b.k if name == "the queries" else used.mT @ b.q)


def _wrong_attention(b: _Backward, name: str) -> Wrong:
    if name == "the values":
        yield from _wrong_values(b)
        return
    for words, slope in wrong_cap_slopes(b.scores, b.raw, b.cap) if b.cap else ():
        yield words, _of(b, name, b.ds * slope / b.slope)
    yield "the weights of the softmax are held constant there: no gradient passes through them", torch.zeros_like(b.q)
    yield "the backward lacks the row sum of the softmax (its delta, sum of g * o)", _of(b, name, b.p * b.dp)
    yield (
        "the backward adds the row sum of the softmax (its delta) instead of subtracting it",
        _of(b, name, b.p * (b.dp + b.delta)),
    )
    yield (
        "the backward takes the mean instead of the sum over keys for the softmax's delta",
        _of(b, name, b.p * (b.dp - b.delta / b.p.shape[-1])),
    )
    yield (
        "the backward sums the softmax's delta over the queries instead of the keys",
        _of(b, name, b.p * (b.dp - (b.dp * b.p).sum(-2, keepdim=True))),
    )
    yield (
        "the backward subtracts the sum of dP without the weights for the softmax's delta",
        _of(b, name, b.p * (b.dp - b.dp.sum(-1, keepdim=True))),
    )
    yield "the backward does not multiply by the weights of the softmax", _of(b, name, b.dp - b.delta)
    if b.allow is not None:
        for words, p in _without_mask(b):
            yield f"the backward forgets the mask: {words}", _of(b, name, p * (b.dp - b.delta))
            own = (b.dp * p).sum(-1, keepdim=True)
            yield f"the backward forgets the mask: {words}", _of(b, name, p * (b.dp - own))
    square = b.p.shape[-1] == b.p.shape[-2]
    if square:
        yield (
            "queries and keys have each other's gradient",
            _of(b, "the keys" if name == "the queries" else "the queries"),
        )
        yield (
            "the derivative of the scores is transposed where it must not be, or not where it must",
            b.scale * (b.ds.mT @ b.k if name == "the queries" else b.ds @ b.q),
        )
        yield (
            "the product is taken with the tensor itself instead of its partner",
            b.scale * (b.ds @ b.q if name == "the queries" else b.ds.mT @ b.k),
        )
    yield from _tiles(b, name)


def _without_mask(b: _Backward) -> Wrong:
    yield "weights are made again without it", (b.raw - b.lse).exp()
    yield "weights are made again without it", b.raw.softmax(-1)


def _wrong_values(b: _Backward) -> Wrong:
    if b.allow is not None:
        for words, p in _without_mask(b):
            yield f"the backward forgets the mask: {words}", _of(b, "the values", p=p)
    if b.p.shape[-1] == b.p.shape[-2]:
        yield "the weights are not transposed", b.p @ b.g
    yield "the weights are not divided by their sum", (b.raw - b.raw.amax(-1, keepdim=True)).exp().mT @ b.g
    yield "the scores stand where the weights must", b.raw.mT @ b.g
    queries = b.g.shape[2]
    for start in range(1, queries):
        yield (
            f"only queries from {start} on count: tiles of queries overwrite one another instead of adding",
            b.p[:, :, start:].mT @ b.g[:, :, start:],
        )


def _tiles(b: _Backward, name: str) -> Wrong:
    """Yield what is left where tiles are not added up, or do not know of one another."""
    axis, others = (-1, "keys") if name == "the queries" else (-2, "queries")
    length = b.ds.shape[axis]
    places = torch.arange(length, device=b.ds.device)
    along = places if axis == -1 else places[:, None]
    for start in range(1, length):
        for kept, words in (
            (
                along >= start,
                f"only {others} from {start} on count: tiles overwrite one another instead of adding",
            ),
            (along < start, f"only {others} 0 to {start - 1} count: what the later tiles add is lost"),
        ):
            yield words, _of(b, name, b.ds * kept)
    keys = b.ds.shape[-1]
    for size in range(2, keys):
        tile = torch.arange(keys, device=b.ds.device) // size
        product = b.dp * b.p
        within = torch.stack([(product * (tile == t)).sum(-1) for t in tile], -1)
        yield (
            f"the softmax's delta is summed over tiles of {size} keys, not over all",
            _of(b, name, b.p * (b.dp - within)),
        )
        mixed = torch.stack([(b.p * (tile == t)).sum(-1) for t in tile], -1)
        inner = b.p * (b.dp - within / mixed)
        yield (
            f"the weights by which blocks of {size} keys are merged are held constant: their log-sum-exp is detached",
            _of(b, name, inner),
        )


def _grouped(whole: Tensor, repeats: int) -> Tensor:
    return whole.unflatten(1, (-1, repeats)).sum(2)


def _wrong_groups(b: _Backward, name: str, repeats: int) -> Wrong:
    whole = _of(b, name)
    split, other = whole.unflatten(1, (-1, repeats)), whole.unflatten(1, (repeats, -1))
    yield (
        "they are summed over the wrong axis: heads h, h + G, ... instead of the heads of the group, h * R to "
        "(h + 1) * R - 1",
        other.sum(1),
    )
    yield "they are averaged over the query heads of a group instead of summed", split.mean(2)
    yield "they are averaged over the query heads of a group, and over the wrong axis", other.mean(1)
    yield "only the first query head of each group counts: they are not summed", split[:, :, 0]
    yield "only the last query head of each group counts: they overwrite one another instead of adding", split[:, :, -1]
    groups = split.shape[1]
    yield "the first G query heads are taken instead of the sums over groups", whole[:, :groups]
    for words, guess in _wrong_attention(b, name):
        yield words, _grouped(guess, repeats)


def _norm(case: Case, made: Setting, name: str) -> tuple[Tensor | None, Wrong]:
    """For any layer that is a norm by what it gives: gain and bias are read off."""
    x = next(iter(made.leaves.values())).detach()
    if name != "the input" and made.leaves[name].ndim != 1:
        return None, iter(())
    y = made.output()
    g = made.weight(y)
    for centred in (True, False):
        centre = x - x.mean(-1, keepdim=True) if centred else x
        root = centre.square().mean(-1, keepdim=True).sqrt()
        hat = centre / root
        flat, out = hat.flatten(0, -2), y.flatten(0, -2)
        if len(flat) < 4:
            return None, iter(())
        mean = (flat.mean(0), out.mean(0))
        gain = ((flat - mean[0]) * (out - mean[1])).sum(0) / (flat - mean[0]).square().sum(0)
        bias = mean[1] - gain * mean[0]
        if float((gain * flat + bias - out).abs().max()) > 1e-3 * size_of(out):  # eps is not known
            continue
        # eps enters here: the inverse root that makes the output right
        inverse = _inverse_root(y, centre, gain, bias)
        return _of_norm(name, made, g, gain, centre * inverse, inverse, centred)
    return None, iter(())


def _inverse_root(y: Tensor, centre: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    along = gain * centre
    return ((y - bias) * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)


def _of_norm(
    name: str, made: Setting, g: Tensor, gain: Tensor, hat: Tensor, inverse: Tensor, centred: bool
) -> tuple[Tensor | None, Wrong]:
    if name != "the input":
        ones = torch.ones_like(hat)
        right = (g * hat).flatten(0, -2).sum(0)
        moved = made.quotient({name: torch.ones_like(made.leaves[name])})
        is_bias = abs(moved - float((g * ones).sum())) < abs(moved - float(right.sum()))
        if is_bias:
            return g.flatten(0, -2).sum(0), iter(())
        raw = hat / inverse
        return right, iter(
            [
                ("the gain's gradient lacks the input: it is that of a bias", g.flatten(0, -2).sum(0)),
                (
                    "the gain's gradient is taken with the input before it is normalised",
                    (g * raw).flatten(0, -2).sum(0),
                ),
            ]
        )
    h = g * gain
    one = h.mean(-1, keepdim=True) if centred else torch.zeros_like(inverse)
    two = hat * (h * hat).mean(-1, keepdim=True)
    right = inverse * (h - one - two)
    spread, root = "standard deviation" if centred else "root mean square", "x_hat * mean(g * gain * x_hat)"
    detached = f"the {spread} is held constant"
    wrong = [
        (f"the term of the {spread}, {root}, is missing: {detached}", inverse * (h - one)),
        ("the term of the mean, mean(g * gain), is missing: the mean is held constant", inverse * (h - two)),
        (f"both terms of the statistics are missing: mean and {spread} are held constant", inverse * h),
        ("the incoming gradient is not multiplied by the gain", inverse * _projected(g, hat, centred)),
        (f"it is not divided by the {spread}", h - one - two),
        (f"the means are taken of g, without the gain, in the terms of mean and {spread}",
         inverse * (h - (g - _projected(g, hat, centred)))),
        ("the gain is multiplied in behind the terms of the statistics, not before they are taken",
         inverse * gain * _projected(g, hat, centred)),
        (f"the gain is missing in the term of the {spread}",
         inverse * (h - one - hat * (g * hat).mean(-1, keepdim=True))),
        ("the gain is missing in the term of the mean", inverse * (h - g.mean(-1, keepdim=True) - two)),
        ("the terms are sums over the channels instead of means", inverse * (h - (one + two) * h.shape[-1])),
        ("the terms of the statistics are added instead of subtracted", inverse * (h + one + two)),
        (f"the term of the {spread} is added instead of subtracted", inverse * (h - one + two)),
        ("the gradient of the input is that of the output", g),
    ]  # fmt: skip
    return right, iter(wrong)


def _projected(g: Tensor, hat: Tensor, centred: bool) -> Tensor:
    plain = g - g.mean(-1, keepdim=True) if centred else g
    return plain - hat * (g * hat).mean(-1, keepdim=True)


def _softmax(case: Case, made: Setting, name: str) -> tuple[Tensor | None, Wrong]:
    scores = next(iter(made.leaves.values())).detach()
    p = made.output()
    g = made.weight(p)
    if p.shape != scores.shape:
        return None, iter(())
    product = g * p
    wrong = [
        ("the row sum of g * p is missing", product),
        ("the row sum of g * p is added instead of subtracted", p * (g + product.sum(-1, keepdim=True))),
        ("the mean of g * p is taken instead of its sum", p * (g - product.mean(-1, keepdim=True))),
        ("the sum of g is taken without the weights", p * (g - g.sum(-1, keepdim=True))),
        ("it is not multiplied by the weights", g - product.sum(-1, keepdim=True)),
        ("each weight is taken to depend on its own score alone", g * p * (1 - p)),
        ("the row sum of g * p runs over another axis", p * (g - product.sum(-2, keepdim=True))),
    ]
    for size in range(1, scores.shape[-1]):
        sums = torch.cat([x.sum(-1, keepdim=True).expand_as(x) for x in product.split(size, -1)], -1)
        told = f"the sum of g * p is taken over tiles of {size} entries by themselves, not over the whole row"
        wrong.append((told, p * (g - sums)))
    return p * (g - product.sum(-1, keepdim=True)), iter(wrong)


def _loss(case: Case, made: Setting, name: str) -> tuple[Tensor | None, Wrong]:
    if case.subject.fact("shifts_labels"):
        return None, iter(())
    logits, labels = made.args[0].detach(), made.args[1]
    counted = (labels != int(case.subject.fact("ignore_index", -100)))[..., None]
    eps, z = (float(case.subject.fact(f, 0.0)) for f in ("label_smoothing", "z_loss"))
    g, p, width = made.weight(made.output()), logits.softmax(-1), logits.shape[-1]
    hot = torch.nn.functional.one_hot(labels.clamp(min=0), width).to(p.dtype)

    smoothed, others = (1 - eps) * hot + eps / width, (1 - hot) * eps / max(width - 1, 1)

    def of(target: Tensor = smoothed, more: float = z, weights: Tensor = p, kept: Tensor = counted) -> Tensor:
        rise = 2 * more * logits.logsumexp(-1, keepdim=True) * p
        return g * (weights - target + rise) * kept / counted.sum().clamp(min=1)

    wrong = [
        ("the backward leaves out the label smoothing", of(hot)),
        ("the backward leaves out the smoothing's share of every entry, eps / V", of((1 - eps) * hot)),
        ("the backward takes nothing off the label for the smoothing: 1 + eps / V", of(hot + eps / width)),
        ("the backward spreads the smoothing over the V - 1 other labels", of((1 - eps) * hot + others)),
        ("the backward leaves out the z-loss", of(more=0.0)),
        ("the backward leaves out the factor 2 of the z-loss, a square", of(more=z / 2)),
        ("the backward divides by all positions, not by those that count", of() * counted.sum() / counted.numel()),
        ("the backward does not divide by the positions that count", of() * counted.sum()),
        ("the backward gives a gradient to positions that are not counted", of(kept=torch.ones_like(counted))),
        ("the backward leaves out the softmax: only the label has a gradient", of(weights=torch.zeros_like(p))),
        ("the backward leaves out the target: all logits are pushed down", g * p * counted / counted.sum()),
    ]
    return of(), iter(wrong)


def _rotary(case: Case, made: Setting, name: str) -> tuple[Tensor | None, Wrong]:
    """Compare with the forward itself: a rotation is linear, and its derivative turns back."""
    x = next(iter(made.leaves.values()))
    with torch.no_grad():
        g, kept = made.weight(made.output()), x.clone()
        x.copy_(g)
        turned = made.output().clone()
        x.copy_(kept)
    right = made.derivative(name) if x.numel() <= 400 else None
    return right, iter(
        [
            ("the backward turns the gradient the same way as the forward, not back", turned),
            ("the backward does not turn the gradient", g),
        ]
    )
