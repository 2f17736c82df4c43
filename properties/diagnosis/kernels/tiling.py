"""Attention at lengths of several tiles of a kernel: the ways to call it, its inputs, and what they must give."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.bench.watches import WorkWatch
from veriformer.properties.definitions.attention_gradients import exact_attention
from veriformer.properties.engine.attending import hides_keys_alone
from veriformer.properties.engine.case import Case
from veriformer.properties.subject.facts import attention_scale
from veriformer.properties.subject.paths import DEFAULT, Path

PROFILES = 5
PARTS = ("output", "gradient of the queries", "gradient of the keys", "gradient of the values")
Normal = Callable[..., Tensor]


@dataclass(frozen=True)
class Situation:
    """One way to call a kernel: B, H, T, S, K, key-value heads (0: as many as heads), a mask, the causal flag.

    `gradients`: those of queries, keys and values are compared too. `words`: what it is in a sentence.
    """

    words: str
    batch: int
    heads: int
    queries: int
    keys: int
    width: int
    groups: int = 0
    masked: bool = False
    causal: bool = False
    gradients: bool = False

    def __str__(self) -> str:
        words = f" and {self.words}" if self.words else ""
        return f"with {self.queries} queries, {self.keys} keys, {self.width} channels a head{words}"


def profiled(normal: Normal, s: Situation, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values whose scores follow another course along the keys in each head of a sample.

    They grow by 12, fall by 12, stay level, rise and fall, or lie all at -120, where exp underflows in float32 and a
    key of zeros would have all the weight; beside noise of unit variance. So later tiles have larger maxima than
    earlier ones, and smaller. Values lie around 1, so that weights that do not sum to one are seen.
    """
    groups = s.groups or s.heads
    query = normal(s.batch, s.heads, s.queries, s.width) * (scale * s.width**0.5) ** -1
    key, value = normal(s.batch, groups, s.keys, s.width), normal(s.batch, groups, s.keys, s.width) + 1
    along = torch.linspace(-1, 1, max(s.keys, 2), dtype=torch.float64, device=key.device)[: s.keys]
    courses = torch.stack([6 * along, -6 * along, 0 * along, 6 - 12 * (along - 0.2).abs(), 0 * along - 120])
    which = torch.arange(groups)[None] + torch.arange(s.batch)[:, None]
    course = courses[(which % PROFILES).to(key.device)].to(key.dtype) * scale**-0.5
    query = torch.cat([torch.full_like(query[..., :1], scale**-0.5), query[..., 1:]], -1)
    return query, torch.cat([course[..., None], key[..., 1:]], -1), value


def mask_of(s: Situation, *, by_rows: bool, generator: torch.Generator) -> Tensor:
    """Return `[B, 1, T, S]` bool: whole tiles are hidden, and others in part.

    Sample by sample keys are hidden before the middle, from there on, or around it. With `by_rows` the rows of every
    second sample differ: a third of them see these, a third a narrow band that moves along the keys, a third a random
    half. Every row sees a key.
    """
    at, half = torch.arange(s.keys), s.keys * 47 // 100
    regions = torch.stack([at >= half, at < half + 3, (at < s.keys // 5) | (at >= s.keys // 5 + half)])
    allow = regions[torch.arange(s.batch) % 3][:, None, None].expand(-1, -1, s.queries, -1)
    if not by_rows:
        return allow.contiguous()
    rows = torch.arange(s.queries)[:, None]
    centre = rows * max(s.keys - 1, 1) // max(s.queries - 1, 1)
    band = (at - centre).abs() <= 5
    sparse = (torch.rand(s.queries, s.keys, generator=generator) < 0.5) | (at == centre)
    third = rows * 3 // s.queries
    mixed = torch.where(third == 0, allow, torch.where(third == 1, band, sparse))
    return torch.where((torch.arange(s.batch) % 2 == 1)[:, None, None, None], mixed, allow)


def causal_allow(queries: int, keys: int, alignment: str, window: int | None = None, sinks: int = 0) -> Tensor:
    """Return `[T, S]` bool: what the causal flag lets be seen, inside a window and behind its first tokens."""
    last = keys - queries if alignment == "bottom-right" else 0
    allow = torch.ones(queries, keys, dtype=torch.bool).tril(last)
    if window is None:
        return allow
    return allow & (allow.triu(last + 1 - window) | (torch.arange(keys) < sinks))


def planned(case: Case) -> Iterator[Situation]:
    """Yield situations, short ones first; lengths lie one beyond whole tiles in the first case, near it in others."""
    subject, near = case.subject, case.choice("near", (0, -1, 1))
    width = case.choice("K", (32, 64, 48, 80, 128))
    masks = subject.takes_mask("pairwise") or subject.takes_mask("padding")
    causal = subject.accepts("causal")
    free = not subject.fact("window")  # of keys that a query sees without the flag it says nothing
    if free:
        yield Situation("", 2, 2, 18, 37 + near, 161, gradients=True)
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
        if subject.fact("grouped_queries"):  # of three, five: rows of a group that are packed end inside of a tile
            words = "causal=True, 3 heads to a key-value head"
            yield Situation(words, 1, 6, 97 + near, 97 + near, width, groups=2, causal=True, gradients=True)
        if masks:
            yield Situation("a mask beside causal=True", 3, 1, 161, 161, width, masked=True, causal=True)
    if free:
        yield Situation("", 2, 4, 1, 1000 + near, width)
        yield Situation("", 1, 2, 128, 256, 2 * width)
        yield Situation("", 1, 1, 300, 1000 + near, width)
        # few multiplications, and more pages, rows and blocks in one batch than a byte or 15 bits count
        yield Situation("33 samples", 33, 2, 3, 523 + near, 16, gradients=True)


def _axes(s: Situation) -> tuple[int, int, int]:
    """Return what work grows with: heads of all samples, queries, keys."""
    return s.batch * s.heads, s.queries, s.keys


@dataclass
class Judged:
    """What a kernel gave, and what it was to give.

    Attributes:
        inputs: queries, keys, values.
        allow: `[B or 1, 1, T, S]`; None where all may be seen.
        pairs: for the output, and where they were taken the three gradients: (got, expected, bound).
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    allow: Tensor | None
    pairs: list[tuple[Tensor, Tensor, Tensor]]


class Tiling:
    """A subject of kind attention, called in situations.

    Attributes:
        case: that it is called for.
        built: its model.
        has_weights: whether that has parameters, and so sizes of its own.
        window: keys that a query sees under the causal flag, as declared; None: all before it.
    """

    def __init__(self, case: Case, built: Built) -> None:
        self.case = case
        self.built = built
        module = built.module
        self.has_weights = isinstance(module, nn.Module) and next(module.parameters(), None) is not None
        fact = case.subject.fact
        self.window, self._sinks, self._cap = fact("window"), fact("sink_tokens", 0), fact("soft_cap")
        self._alignment: str | None = None

    def fitted(self, s: Situation) -> Situation | None:
        """Return the situation with the sizes of a kernel with parameters; None where it cannot be."""
        if max(s.queries, s.keys) > self.case.subject.fact("max_len", 1 << 30):
            return None
        if not self.has_weights:
            return s
        config = self.built.config
        groups = config.num_key_value_heads if s.groups else 0
        return replace(s, heads=config.num_heads, width=config.d_head, groups=groups)

    def scale(self, s: Situation) -> float:
        """Return the declared factor on q k^T."""
        return attention_scale(self.case.subject.fact("attention_scale"), s.width, s.width * s.heads)

    def allowed(self, s: Situation, mask: Tensor | None) -> Tensor | None:
        """Return what may be seen, `[B or 1, 1, T, S]`; None where everything may."""
        if not s.causal:
            return mask
        alignment = "bottom-right" if s.queries == s.keys else self.alignment
        flag = causal_allow(s.queries, s.keys, alignment, self.window, self._sinks)[None, None]
        return flag if mask is None else flag.to(mask.device) & mask

    def judge(self, s: Situation, *, path: Path = DEFAULT, normal: Normal | None = None) -> Judged:
        """Call the subject, and return what it gave beside what it was to give; `normal` draws instead of the case.

        Raises:
            SubjectError: it refused, or failed.
        """
        case, device = self.case, self.case.bench.device
        draw = normal or (lambda *shape: case.normal(*shape, dtype=self.built.dtype))
        inputs = profiled(draw, s, self.scale(s))
        mask = weight = None
        if s.masked:
            rows = not hides_keys_alone(case.subject) and not s.causal
            mask = mask_of(s, by_rows=rows, generator=case.generator).to(device)
        if s.gradients:
            inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)  # type: ignore[assignment]
        given = {"causal": True} if s.causal and case.subject.accepts("causal") else {}
        got = case.call(self.built, *inputs, attention_mask=mask, path=path, **given)
        allow = self.allowed(s, mask)
        found = [got]
        if s.gradients and got.requires_grad and got.shape == (*inputs[0].shape[:3], inputs[2].shape[-1]):
            weight = draw(*got.shape)
            try:
                found += torch.autograd.grad((got * weight.to(got)).sum(), inputs, materialize_grads=True)
            except (RuntimeError, NotImplementedError):  # a kernel without a backward at these sizes
                weight = None
        exact = case.apply(exact_attention, *inputs, self.scale(s), allow, self._cap, weight)
        exact = tuple(x.to(got.device) for x in exact)
        pairs = [(x, exact[2 * i], exact[2 * i + 1]) for i, x in enumerate(found)]
        if s.causal and allow is not None and not bool(allow.any(-1).all()):
            # of queries that see no key attention.empty-row speaks
            seeing = allow.any(-1).expand(got.shape[:3]).to(got.device)
            pairs = [(x[seeing], y[seeing], unit.expand_as(y)[seeing]) for x, y, unit in pairs[:1]]
        return Judged(inputs, allow, pairs)

    @property
    def alignment(self) -> str:
        """How the causal mask is aligned: as declared, else as with three queries and five keys; "" if neither way."""
        if self._alignment is None:
            declared = self.case.subject.fact("causal_alignment")
            self._alignment = declared or self._measured_alignment()
        return self._alignment

    def _measured_alignment(self) -> str:
        s = self.fitted(Situation("", 1, 2, 3, 5, 16, causal=True))
        if s is None:
            return ""
        for self._alignment in ("bottom-right", "top-left"):
            try:
                got, expected, bound = self.judge(s, normal=self.steady()).pairs[0]
            except SubjectError:
                break
            if got.shape == expected.shape and bool(((got - expected).abs() <= bound).all()):
                return self._alignment
        return ""

    def steady(self, seed: int = 5) -> Normal:
        """Return what draws from a generator of its own, so that nothing of the case is used up."""
        generator = torch.Generator().manual_seed(seed)
        device, dtype = self.case.bench.device, self.built.dtype
        return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    def foreseen(self, s: Situation) -> float:
        """Return the work of a call, in multiplications, its steps foretold from small calls: the same on any machine.

        With its gradients a call is three and a half of it.
        """
        key = ("steps of tiling", self.built.config, self.built.dtype)
        measured = self.case.bench.measured
        if key not in measured:
            measured[key] = self._steps()
        work, grows = measured[key]
        arithmetic = 2 * math.prod(_axes(s)) * s.width
        steps = work * math.prod((n / small) ** power for n, (small, power) in zip(_axes(s), grows, strict=True))
        return float(arithmetic + steps) * (3.5 if s.gradients else 1)

    def _steps(self) -> tuple[float, list[tuple[int, float]]]:
        """Return the steps of a small call, and by which power they grow along each axis: doubled one by one.

        Of whole tiles too, for a kernel that takes no others; nothing where it takes neither.
        """
        for small in (Situation("", 1, 1, 33, 65, 16), Situation("", 1, 1, 64, 64, 64)):
            work = self._work(small)
            if work is None:
                continue
            twice = (
                replace(small, heads=2),
                replace(small, queries=2 * small.queries),
                replace(small, keys=2 * small.keys),
            )
            more = [self._work(s) or work for s in twice]
            return work, [(n, math.log2(max(w / work, 1.0))) for n, w in zip(_axes(small), more, strict=True)]
        return 0.0, [(1, 0.0)] * 3

    def _work(self, small: Situation) -> float | None:
        fitted = self.fitted(small)
        if fitted is None:
            return None
        inputs = profiled(self.steady(), fitted, self.scale(fitted))
        try:
            with torch.no_grad(), WorkWatch() as watch:
                self.case.call(self.built, *inputs)
        except SubjectError:
            return None
        return watch.work
