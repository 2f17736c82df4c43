"""What the weights that an attention really uses say of its code, against those of the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from veriformer.properties.engine.case import Case
from veriformer.properties.formulas.streamed import streamed_cause


@dataclass(frozen=True)
class Read:
    """Weights that were read out of an attention, and what they should be made of.

    Attributes:
        weights: `[B, H, T, B, G, S]`: of a query of one sample and head on a key of another.
        scores: `[B, H, T, S]`, scaled and capped as declared.
        allow: `[B, H, T, S]` bool: which keys each query may see.
        cross: `[B, H, T, S]`: q k^T without a scale.
        mask: `[B, 1, T, S]` bool, what was given beside the causal flag; None without.
        is_causal: whether that flag was given.
        scale: declared.
        width: K, of queries and keys.
        values: E, of values.
        soft_cap: declared; None without.
        has_sink: whether rows may sum to less than one.
        slack: largest difference that is rounding.
    """

    weights: Tensor
    scores: Tensor
    allow: Tensor
    cross: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float = 1.0
    width: int = 1
    values: int = 1
    soft_cap: float | None = None
    has_sink: bool = False
    slack: float = 1e-9

    @property
    def right(self) -> Tensor:
        """The weights of the definition, `[B, H, T, S]`; a row without a key holds zeros."""
        return self.scores.masked_fill(~self.allow, -torch.inf).softmax(-1).nan_to_num(0.0)

    @property
    def own(self) -> Tensor:
        """The weights on the keys of a query's own sample and key-value head, `[B, H, T, S]`."""
        batch, heads, _, _, groups, _ = self.weights.shape
        of = torch.arange(heads) // (heads // groups)
        rows = [torch.stack([self.weights[b, h, :, b, of[h]] for h in range(heads)]) for b in range(batch)]
        return torch.stack(rows)

    def sink_mass(self) -> Tensor:
        """Return what stands in the denominator beside the visible keys, `[B, H, T]`: exp of a sink's score."""
        kept = self.own.sum(-1)
        return self.scores.masked_fill(~self.allow, -torch.inf).exp().sum(-1) * (1 / kept - 1)

    def agrees(self, got: Tensor, wanted: Tensor) -> bool:
        """Return whether two sets of weights are equal; with a sink, up to a factor a row, which is below one."""
        if self.has_sink:
            kept = got.sum(-1, keepdim=True)
            if not bool(((kept > self.slack) & (kept < 1 + self.slack)).all()):
                return False
            got = got / kept
        return not bool(((got - wanted).abs() > self.slack * 10).any())

    def is_right(self) -> bool:
        """Return whether the weights are those of the definition, where a query sees anything."""
        rows = self.allow.any(-1)
        stray = self.weights.sum((3, 4)) - self.own
        if self.has_sink:
            mass = [m[r] for m, r in zip(self.sink_mass().transpose(0, 1), rows.transpose(0, 1), strict=True)]
            if any(float(m.max() - m.min()) > 1e-4 * (1 + float(m.abs().max())) for m in mass if m.numel()):
                return False
        return self.agrees(self.own[rows], self.right[rows]) and not bool((stray.abs() > self.slack).any())


def if_meant(case: Case, told: str) -> str:
    """Return what to declare where a scale that holds everywhere may be meant."""
    undeclared = case.subject.fact("attention_scale") is None
    return " (declare attention_scale if that is meant)" if undeclared and told.startswith("scores are scaled") else ""


def whose(read: Read) -> str | None:
    """Say whose values a query reads; None if they are those of its own sample and key-value head."""
    batch, heads, _, _, groups, _ = read.weights.shape
    mass = read.weights.abs().sum((2, 5))  # of each query head on each key-value head, [B, H, B, G]
    each = heads // groups
    taken = [
        [[(c, g) for c in range(batch) for g in range(groups) if mass[b, h, c, g] > read.slack] for h in range(heads)]
        for b in range(batch)
    ]
    if all(taken[b][h] == [(b, h // each)] for b in range(batch) for h in range(heads)):
        return None
    if any(not row for sample in taken for row in sample):
        return None
    if any(len(row) > 1 for sample in taken for row in sample):
        samples = any({c for c, _ in row} != {b} for b in range(batch) for row in taken[b])
        return f"values of several {'samples' if samples else 'heads'} enter one output: they are mixed"
    used = [[taken[b][h][0] for h in range(heads)] for b in range(batch)]
    if any(used[b][h][0] != b for b in range(batch) for h in range(heads)):
        return f"sample 0, head {heads - 1} reads the values of sample {used[0][-1][0]}, head {used[0][-1][1]}"
    read_from = [g for _, g in used[0]]
    wanted = [h // each for h in range(heads)]
    tiled = (
        " (tiled where they are to be repeated one after another)"
        if read_from == [h % groups for h in range(heads)]
        else ""
    )
    words = f"query heads read the values of key-value heads {read_from} instead of {wanted}{tiled}"
    batches = torch.arange(batch)
    got = torch.stack([read.weights[batches, h, :, batches, read_from[h]] for h in range(heads)], 1)
    order = [(h % groups) * each + h // groups for h in range(heads)]
    if read.agrees(got, read.right[:, order]):
        return (
            f"heads come out in the order {order}: groups and the heads of a group change places before they are merged"
        )
    if read.agrees(got, read.right):
        return f"{words}; the keys are the right ones"
    return words


def weighed(read: Read) -> str | None:
    """Say how keys are weighed that are rightly seen; None if that is right, or unlike all that is known."""
    own, right = read.own, read.right
    rows = read.allow.any(-1)
    ratio = torch.where(read.allow, own / right.clamp(min=1e-300), torch.ones_like(own))
    spread = [float(r[a].max() - r[a].min()) for r, a in zip(ratio[rows], read.allow[rows], strict=True)]
    loose = 1e-6 if read.slack < 1e-6 else 1e-3
    told = _formulas(read) or _streamed(read, loose)
    if told is None and max(spread) < loose:
        return _normalised(read, own.sum(-1)[rows], rows)
    return told or _tempered(read, loose) or _moved(read) or _blocks(read, ratio, loose)


def _streamed(read: Read, loose: float) -> str | None:
    if read.has_sink or read.scores.shape[-1] < 2:
        return None
    shown = read.scores.masked_fill(~read.allow, -torch.inf)
    return streamed_cause(shown.flatten(0, 2), read.own.flatten(0, 2), loose)


def _normalised(read: Read, sums: Tensor, rows: Tensor) -> str | None:
    if float((sums - 1).abs().max()) < read.slack * 10:
        return None
    if read.has_sink:
        return _sink(read, rows)
    if float(sums.max() - sums.min()) < 1e-6:
        return f"all weights are {float(sums[0]):.4g} times the right ones: a factor is applied after the softmax"
    shown = read.scores.masked_fill(~read.allow, -torch.inf)[rows]
    phantoms = shown.exp().sum(-1) * (1 / sums - 1)
    least = f"{float(sums.min()):.3g}" if len(sums) == 1 else f"{float(sums.min()):.3g} to {float(sums.max()):.3g}"
    if float(phantoms.max() - phantoms.min()) < 1e-4 * float(phantoms.abs().max()) and float(phantoms.min()) > 0:
        number = float(phantoms.mean())
        if abs(number - round(number)) < 1e-4:
            count = (
                "one more key of score 0 takes" if round(number) == 1 else f"{round(number)} more keys of score 0 take"
            )
            return f"the weights of a row sum to {least}: {count} part in the softmax, without a value"
    divisors = shown.exp().sum(-1) / sums
    if float(divisors.max() - divisors.min()) < 1e-6 * float(divisors.mean()):
        number = float(divisors.mean())
        return f"the exponentials are divided by {number:.4g} for every query instead of by their sum"
    return (
        f"the weights of a row stand in the right proportions and sum to {least} instead of 1: "
        "the denominator is wrong (the sum of the exponentials is not rescaled, or counts others)"
    )


def _sink(read: Read, rows: Tensor) -> str | None:
    """Say what is wrong with the share of a sink, whose score is one number for all queries of a head."""
    shown = read.scores.masked_fill(~read.allow, -torch.inf)
    mass, largest = read.sink_mass(), shown.amax(-1)
    if bool(((mass / largest.exp() - 1)[rows].abs() < 1e-5).all()):
        return (
            "the sink's term in the denominator is 1 after the scores were shifted by their row's maximum, where it is "
            "to be shifted too: exp(-max)"
        )
    return "the score of the sink is another one for each query"


def _tempered(read: Read, loose: float) -> str | None:
    """Say by which factor scores enter: the slope of log weights against the scores."""
    rows = read.allow.any(-1) & (read.allow.sum(-1) > 1)
    above, below, pairs = 0.0, 0.0, []
    for b, h, t in rows.nonzero().tolist():
        seen = read.allow[b, h, t]
        logs, scores = read.own[b, h, t][seen], read.scores[b, h, t][seen]
        if bool((logs <= 0).any()):
            return None
        logs = logs.log() - logs.log().mean()
        scores = scores - scores.mean()
        above, below = above + float((logs * scores).sum()), below + float((scores * scores).sum())
        pairs.append((logs, scores))
    if not pairs or below == 0:
        return None
    slope = above / below
    if not read.has_sink and float((read.own.sum(-1)[rows] - 1).abs().max()) > 10 * loose:
        return None
    if abs(slope - 1) < 1e-4 or any(float((logs - slope * scores).abs().max()) > 10 * loose for logs, scores in pairs):
        return None
    used, heads = slope * read.scale, read.scores.shape[1]
    names = {
        "1/sqrt(d_head)": read.width**-0.5, "1/d_head (scaled twice)": 1 / read.width, "1 (no scaling)": 1.0,
        "sqrt(d_head)": read.width**0.5, "1/sqrt(width of the values)": read.values**-0.5,
        "d_head^-1/4 (one of two factors is missing)": read.width**-0.25,
        "1/sqrt(d_model)": (read.width * heads) ** -0.5, "1/sqrt(number of queries)": read.scores.shape[2] ** -0.5,
        "1/sqrt(number of keys)": read.scores.shape[3] ** -0.5,
        "log 2 times the declared one (exp2 for exp)": read.scale * math.log(2),
        "log2(e) times the declared one (exp for exp2)": read.scale / math.log(2),
    }  # fmt: skip
    known = [name for name, number in names.items() if abs(used - number) < 1e-4 * abs(number)]
    told = f"{known[0]} = {used:.4g}" if len(known) == 1 else f"{used:.4g}"
    return f"scores are scaled by {told} instead of {read.scale:.4g}"


def _moved(read: Read) -> str | None:
    """Tell weights that are right and stand at other keys or queries."""
    own, right, keys = read.own, read.right, read.scores.shape[-1]
    for step in range(1, keys):
        wanted = right.roll(-step, -1)
        if read.agrees(own, wanted):
            return f"each value is weighed by the weight of the key {step} further on: keys and values are shifted"
        cut = wanted.clone()
        cut[..., keys - step :] = own[..., keys - step :]
        kept = cut / right[..., step:].sum(-1, keepdim=True) if read.has_sink else cut
        if read.has_sink:
            shown, other = own[..., : keys - step], right[..., step:]
            ratio = shown / other.clamp(min=1e-300)
            if keys - step > 1 and float((ratio.amax(-1) - ratio.amin(-1)).abs().max()) < 1e-6:
                return f"each value is weighed by the weight of the key {step} further on, the last by that of the sink"
        elif keys - step > 1 and not bool(((own - kept)[..., : keys - step].abs() > read.slack * 10).any()):
            return f"each value is weighed by the weight of the key {step} further on: keys and values are shifted"
    if read.agrees(own, right.flip(-1)):
        return "the values stand in reversed order under the weights"
    return None


def _blocks(read: Read, ratio: Tensor, loose: float) -> str | None:
    """Tell keys that are weighed right among themselves and wrong beside those of other blocks."""
    keys = ratio.shape[-1]
    together = torch.ones(keys - 1, dtype=torch.bool)
    for row, allow in zip(ratio[read.allow.any(-1)], read.allow[read.allow.any(-1)], strict=True):
        both = allow[1:] & allow[:-1]
        together &= ~both | ((row[1:] - row[:-1]).abs() < loose * row[1:].abs())
    cuts = [0, *(int(s) + 1 for s in (~together).nonzero().flatten()), keys]
    blocks = [(a, b - 1) for a, b in pairwise(cuts)]
    if len(blocks) < 2 or 2 * len(blocks) > keys:
        return None
    sums = read.own.sum(-1)[read.allow.any(-1)]
    said = " and ".join(f"{a} to {b}" if a != b else f"{a}" for a, b in blocks[:3])
    summed = ", and a row's weights do not sum to 1" if float((sums - 1).abs().max()) > 1e-6 else ""
    if repeated := _repeated(read, ratio, blocks):
        return repeated
    return (
        f"keys {said} are weighed right among themselves and wrong beside one another{summed}: blocks of keys are "
        "merged with wrong factors (their maxima or log-sum-exps)"
    )


def _formulas(read: Read) -> str | None:
    """Tell softmaxes over another axis, and scores that are made otherwise: if one alone fits."""
    shown = read.scores.masked_fill(~read.allow, -torch.inf)
    plain = read.cross * read.scale
    together = (
        shown.transpose(1, 2).flatten(2).softmax(-1).unflatten(2, (shown.shape[1], shown.shape[3])).transpose(1, 2)
    )
    candidates = [
        ("the softmax over the queries instead of the keys is taken", shown.softmax(-2)),
        ("the softmax over the heads instead of the keys is taken", shown.softmax(1)),
        ("the softmax over the samples instead of the keys is taken", shown.softmax(0)),
        ("one softmax over heads and keys together is taken", together),
        ("the scale is applied after the softmax", (shown / read.scale).softmax(-1) * read.scale),
        ("the mask is applied after the softmax, without renormalising", read.scores.softmax(-1) * read.allow),
    ]
    candidates = [c for c in candidates if not read.agrees(c[1].nan_to_num(0.0), read.right)]
    made = [
        ("scores enter squared", plain**2),
        ("scores enter without their sign", plain.abs()),
        ("negative scores are cut off at 0 before the softmax", plain.relu()),
        ("scores are scaled by the right factor and negated", -plain),
    ]
    if read.soft_cap:
        cap = read.soft_cap
        made += [
            ("the scores are not capped", plain),
            ("the soft cap is put on the scores before they are scaled", cap * (read.cross / cap).tanh() * read.scale),
            ("the soft cap is tanh(s / c) without the factor c", (plain / cap).tanh()),
            ("the soft cap is c tanh(s) without the division by c", cap * plain.tanh()),
            (
                "the soft cap is put on scores in base 2, times log2(e), and is log(2) times the declared one so",
                cap * math.log(2) * (plain / (cap * math.log(2))).tanh(),
            ),
            ("the scores are cut off at the cap (clamp) instead of tanh", plain.clamp(-cap, cap)),
        ]
    candidates += [(words, scores.masked_fill(~read.allow, -torch.inf).softmax(-1)) for words, scores in made]
    fitting = [words for words, wrong in candidates if read.agrees(read.own, wrong.nan_to_num(0.0))]
    return fitting[0] if len(fitting) == 1 else None


def _repeated(read: Read, ratio: Tensor, blocks: list[tuple[int, int]]) -> str | None:
    """Tell that some blocks of keys count several times: in every row that sees them all."""
    rows = ratio[read.allow.all(-1)]
    if not len(rows):
        return None
    own = torch.stack([rows[:, a] for a, _ in blocks], dim=-1)
    times = own / own.amin(-1, keepdim=True)
    whole = times.round()
    if float((times - whole).abs().max()) > 1e-3 or float(whole.max()) < 2 or bool((whole != whole[:1]).any()):
        return None
    counted = [(a, b, int(n)) for (a, b), n in zip(blocks, whole[0].tolist(), strict=True) if n > 1]
    return "; ".join(
        f"keys {a} to {b} count {n} times" if b > a else f"key {a} counts {n} times" for a, b, n in counted
    )
