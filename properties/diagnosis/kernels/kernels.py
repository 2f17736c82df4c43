"""What is wrong with an attention kernel: where it is wrong at all, and the weights that it really uses there.

The output is linear in the values, so a kernel that is called on values of one key at a time gives its weights away.
Sizes and arguments are tried from the plainest on; the first that is wrong is where the weights are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.influence_maps import causal_region
from veriformer.properties.definitions.attention import attention_bound, attention_oracle
from veriformer.properties.diagnosis.attention.normed import normed_over
from veriformer.properties.diagnosis.attention.seen import seen
from veriformer.properties.diagnosis.attention.weights import Read, if_meant, weighed, whose
from veriformer.properties.engine.attending import hides_keys_alone
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.violations import Violation
from veriformer.properties.subject.facts import attention_scale
from veriformer.properties.subject.paths import Path

_LENGTHS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 18, 31, 32, 33, 34, 63, 64, 65, 66, 129)
"""Numbers of keys (or queries) that are tried one after another, to find where a block begins: no size of a head."""

_SEEDS = (7, 8, 9)  # of inputs: which block holds the largest score decides what a wrong merge does


@dataclass(frozen=True)
class Sizes:
    """One way to call a kernel: B, H, key-value heads, T, S, K, E, and whether a mask or the causal flag is given.

    `loud`: keys that the mask hides are a thousand times larger. `level`: of all scores. `seed`: of the inputs.
    """

    batch: int = 1
    heads: int = 1
    groups: int = 1
    queries: int = 2
    keys: int = 3
    width: int = 16
    values: int = 16
    masked: bool = False
    causal: bool = False
    loud: bool = False
    level: float = 0.0
    seed: int = 7


def kernel_opinion(case: Case, problem: Violation) -> str | None:
    """Say under which condition a kernel is wrong, and what its weights are there; None where nothing explains it."""
    where, told = _found(case, problem)
    if told and not where:
        return told + if_meant(case, told)
    return ": ".join(part for part in (where, told) if part) if told else None


def kernel_condition(case: Case, problem: Violation) -> str | None:
    """Say under which condition alone a kernel is wrong."""
    return _found(case, problem)[0] or None


def _found(case: Case, problem: Violation) -> tuple[str, str | None]:
    mode = next((m for m in ("no_grad", "inference") if f"mode={m}" in problem.path), "grad")
    key = ("diagnosis of the kernel", mode)
    if key not in case.bench.measured:
        case.bench.measured[key] = ("", None)  # where measuring breaks
        case.bench.measured[key] = _measured(case, mode)
    found: tuple[str, str | None] = case.bench.measured[key]
    return found


def _measured(case: Case, mode: str) -> tuple[str, str | None]:
    kernel = _Kernel(case, mode)
    if case.subject.fact("query_key_norm"):
        return "", kernel.normed()
    for where, sizes in _ladder(kernel):
        found = kernel.wrong(sizes)
        if found is None:
            continue
        if found.loud:
            return where, kernel.told_of_loud(found)
        if found.level:
            return where, kernel.told_of_level(found)
        larger = kernel.wrong(replace(found, queries=found.queries + 6, keys=found.keys + 6))
        return where, next((words for words in map(kernel.told, (larger, found)) if words), None)
    return "", None


def _ladder(kernel: _Kernel) -> Iterator[tuple[str, Sizes]]:
    """Yield conditions with sizes that meet them and none that come later; the plainest has no words."""
    plain, subject = kernel.plain, kernel.case.subject
    square = replace(plain, queries=5, keys=5)
    if kernel.wrong(plain) is not None:
        yield kernel.multiples(plain), plain
    yield from kernel.first_wrong("keys", plain)
    yield from kernel.first_wrong("queries", plain)
    for level, words in ((-2000.0, "far below 0"), (2000.0, "far above 0")):
        yield f"where all scores of a row are {words}", replace(plain, level=level)
    yield "where there are as many queries as keys", square
    yield "where there are more queries than keys", replace(plain, queries=5)
    if not kernel.has_own_sizes:
        yield "where there are as many keys as channels of a head", replace(plain, keys=plain.width)
        yield "where values are wider than keys", replace(plain, values=plain.width + 2)
        yield "with more than one head", replace(plain, heads=2, groups=2)
    yield "with more than one sample", replace(plain, batch=2)
    yield "with more than one sample and more than one head", replace(plain, batch=2, heads=2, groups=2)
    grouped = replace(plain, heads=4, groups=2)
    shares = not kernel.has_own_sizes and kernel.output(grouped) is not None
    if shares:
        yield "where heads share keys and values", grouped
    masks = subject.takes_mask("pairwise") or subject.takes_mask("padding")
    if masks:
        yield from _with_masks(kernel, replace(plain, masked=True), "where a mask is given")
    if masks and shares:
        yield "where a mask is given and heads share keys and values", replace(grouped, masked=True, queries=5, keys=6)
    if subject.accepts("causal"):
        causal = replace(plain, causal=True)
        yield "with causal=True", replace(square, causal=True)
        if shares:
            yield (
                "with causal=True and heads that share keys and values",
                replace(grouped, causal=True, queries=5, keys=5),
            )
        if masks:
            yield "where a mask and causal=True are given together", replace(square, causal=True, masked=True)
        yield from kernel.first_wrong("both", replace(square, causal=True), "with causal=True ")
        if subject.fact("causal_alignment") == "top-left":
            return  # where T and S differ its mask is another one than is measured here, by design
        yield "with causal=True and fewer queries than keys", replace(causal, queries=2, keys=6)
        yield from kernel.first_wrong("keys", causal, "with causal=True ")
        yield "with causal=True and more queries than keys", replace(causal, queries=6)


def _with_masks(kernel: _Kernel, masked: Sizes, words: str) -> Iterator[tuple[str, Sizes]]:
    yield words, replace(masked, keys=5)
    yield f"{words} and there are as many queries as keys", replace(masked, queries=4, keys=4)
    heads = 1 if kernel.has_own_sizes else 2
    yield f"{words} and there is more than one head", replace(masked, keys=5, heads=2, groups=2)
    yield f"{words} and there is more than one sample", replace(masked, keys=5, batch=2)
    several = replace(masked, keys=5, batch=2, heads=masked.heads * heads, groups=masked.groups * heads)
    yield f"{words} and there are several samples and heads", several
    yield from kernel.first_wrong("keys", masked, f"{words}, ")
    yield f"{words} and hidden keys are large", replace(masked, keys=5, loud=True)


class _Kernel:
    """The subject as a function of sizes alone: fixed inputs for each, in the widest dtype that it takes."""

    def __init__(self, case: Case, mode: str) -> None:
        self.case = case
        self.mode = mode
        self.built, self.dtype = self._built()
        config = self.built.config
        module = self.built.module
        self.has_own_sizes = isinstance(module, torch.nn.Module) and next(module.parameters(), None) is not None
        own = Sizes(heads=config.num_heads, groups=config.num_heads, width=config.d_head, values=config.d_head)
        self.plain = own if self.has_own_sizes else Sizes()
        if self.output(self.plain) is None and not self.has_own_sizes:
            self.plain = Sizes(heads=2, groups=2)

    def _built(self) -> tuple[Built, torch.dtype]:
        config = self.case.config()
        for dtype in (torch.float64, torch.float32):
            try:
                return self.case.bench.pool.get(config, dtype), dtype
            except (SubjectError, ValueError, RuntimeError):
                continue
        return self.case.built(), torch.float32

    def inputs(self, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values that depend on the sizes alone."""
        generator = torch.Generator().manual_seed(sizes.seed)
        shapes = (
            (sizes.batch, sizes.heads, sizes.queries, sizes.width),
            (sizes.batch, sizes.groups, sizes.keys, sizes.width),
            (sizes.batch, sizes.groups, sizes.keys, sizes.values),
        )
        q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes)
        q = q / 2  # weights that can all be told from 0
        if sizes.level:
            q[..., 0] = 1.0
            k[..., 0] = sizes.level / self.scale(sizes)
        mask = self.mask(sizes) if sizes.loud else None
        if mask is not None:
            k = torch.where(mask.any(2, keepdim=True).transpose(-2, -1), k, 1000 * k)
        return q, k, v

    def mask(self, sizes: Sizes) -> Tensor | None:
        """Return `[B, 1, T, S]` bool, in which every query sees at least one key and some are hidden; None without."""
        if not sizes.masked:
            return None
        generator = torch.Generator().manual_seed(11)
        rows = 1 if sizes.loud or hides_keys_alone(self.case.subject) else sizes.queries
        allow = torch.rand(sizes.batch, 1, rows, sizes.keys, generator=generator) < 0.6
        for b in range(sizes.batch):
            for t in range(rows):
                allow[b, 0, t, (t + b) % sizes.keys] = True
                if bool(allow[b, 0, t].all()):
                    allow[b, 0, t, (t + b + 1) % sizes.keys] = False
        if rows > 1 and torch.equal(allow[:, :, 0], allow[:, :, 1]):
            allow[:, :, 1] = allow[:, :, 1].roll(1, -1)
        return allow.expand(-1, -1, sizes.queries, -1).contiguous()

    def allowed(self, sizes: Sizes) -> Tensor | None:
        """Return what may be seen, `[B, 1, T, S]`; None where everything may."""
        allow = self.mask(sizes)
        if sizes.causal:
            flag = causal_region(max(sizes.queries, sizes.keys))[-sizes.queries :, -sizes.keys :]
            if sizes.queries < sizes.keys or sizes.queries > sizes.keys:
                flag = torch.ones(sizes.queries, sizes.keys, dtype=torch.bool).tril(sizes.keys - sizes.queries)
            allow = flag[None, None] if allow is None else allow & flag
        return allow

    def scale(self, sizes: Sizes) -> float:
        """Return the declared factor on q k^T."""
        return attention_scale(self.case.subject.fact("attention_scale"), sizes.width, sizes.width * sizes.heads)

    def output(self, sizes: Sizes, value: Tensor | None = None) -> Tensor | None:
        """Return what the kernel gives, `[B, H, T, E]` float64; None if it refuses."""
        q, k, v = self.inputs(sizes)
        given = {"causal": True} if sizes.causal else {}
        inputs = [x.to(self.case.bench.device) for x in (q, k, v if value is None else value)]
        mask = self.mask(sizes)
        try:
            got = self.case.call(
                self.built, *inputs, path=Path(mode=self.mode),
                attention_mask=None if mask is None else mask.to(self.case.bench.device), **given,
            )  # fmt: skip
        except SubjectError:
            return None
        wanted = (sizes.batch, sizes.heads, sizes.queries, sizes.values)
        return got.detach().double().cpu() if tuple(got.shape) == wanted else None

    def wrong(self, sizes: Sizes) -> Sizes | None:
        """Return the sizes, with inputs for which it is wrong there; None if there are none, or it refuses them."""
        return next((s for s in (replace(sizes, seed=seed) for seed in _SEEDS) if self._is_wrong(s)), None)

    def _is_wrong(self, sizes: Sizes) -> bool:
        got = self.output(sizes)
        if got is None:
            return False
        if self.case.subject.fact("sink"):
            read = self.read(sizes)
            return read is not None and not (read.is_right() and self._sink_is_one(sizes, read))
        q, k, v = self.inputs(sizes)
        allow = self.allowed(sizes)
        cap = self.case.subject.fact("soft_cap")
        expected = attention_oracle(q, k, v, scale=self.scale(sizes), allow=allow, soft_cap=cap)
        bound = 4 * attention_bound(q, k, v, self.scale(sizes)) + 1e-12
        shown = torch.ones(got.shape[:3], dtype=torch.bool) if allow is None else allow.any(-1).expand(got.shape[:3])
        off = ((got - expected).abs() > bound) | ~got.isfinite()
        return bool(off[shown].any())

    def _sink_is_one(self, sizes: Sizes, read: Read) -> bool:
        times = self._sink_times(sizes, read)
        return times is None or abs(times - 1) < 1e-4

    def _sink_times(self, sizes: Sizes, read: Read) -> float | None:
        """Return how often the sink counts in the denominator, in units of that at the plainest sizes."""
        if sizes == self.plain or sizes.heads != self.plain.heads:
            return None
        plain = self.read(self.plain)
        if plain is None:
            return None
        return float(read.sink_mass().mean() / plain.sink_mass().mean())

    def first_wrong(self, axis: str, plain: Sizes, words: str = "") -> Iterator[tuple[str, Sizes]]:
        """Yield the first length that is wrong, where shorter ones are right, with the longest of those."""
        last = 0
        for length in _LENGTHS:
            if axis == "keys" and plain.causal and length <= plain.queries:
                continue
            sizes = _with(plain, axis, length)
            if self.wrong(sizes) is None:
                last = length
                continue
            if last:
                what = "queries and keys" if axis == "both" else axis
                yield f"{words}right up to {last} {what}, wrong with {length}", sizes
            return

    def multiples(self, plain: Sizes) -> str:
        """Say that it is right where the number of keys is a multiple of a block, and there alone; else nothing."""
        right = {n for n in _LENGTHS if n <= 34 and self.wrong(_with(plain, "keys", n)) is None}
        for block in (2, 4, 8, 16, 32):
            if len(right) > 1 and right == {n for n in _LENGTHS if n <= 34 and n % block == 0}:
                return f"wrong unless the number of keys is a multiple of {block}"
        return ""

    def normed(self) -> str | None:
        """Say over which axis queries and keys are normalised, if not over the channels."""
        sizes = replace(self.plain, batch=2, queries=3, keys=5)
        sizes = sizes if self.has_own_sizes else replace(sizes, heads=2, groups=2)
        read = self.read(sizes)
        q, k, _ = (x.double() for x in self.inputs(sizes))
        return None if read is None else normed_over(read.own, q, k)

    def told_of_loud(self, sizes: Sizes) -> str:
        """Say what large hidden keys do: they are seen, or nothing is."""
        read = self.read(sizes)
        if read is not None and bool((read.own[~read.allow].abs() > read.slack).any()):
            return "they get a weight: the mask lowers scores by a finite number, which large scores exceed"
        return "the row's maximum, or another number that all keys share, is taken over hidden keys too"

    def told_of_level(self, sizes: Sizes) -> str | None:
        """Say what scores that are all far from 0 do, though a softmax does not know what is added to all of them."""
        got = self.output(sizes)
        if got is None:
            return None
        if not bool(got.isfinite().all()):
            return "the output is not finite: the exponentials overflow, or 0 is divided by 0; no maximum is subtracted"
        if not bool(got.any()):
            return "the output is 0: the exponentials underflow; what is subtracted is not the row's maximum"
        return None

    def told(self, sizes: Sizes | None) -> str | None:
        """Say what the weights are like at these sizes."""
        if sizes is None:
            return None
        if sizes.values > sizes.width and (lost := self._lost_channels(sizes)):
            return lost
        read = self.read(sizes)
        if read is not None and read.has_sink and read.is_right():
            times = self._sink_times(sizes, read)
            return f"the sink counts {times:.4g} times in the denominator instead of once" if times else None
        return (whose(read) or seen(read) or weighed(read)) if read is not None else None

    def _lost_channels(self, sizes: Sizes) -> str | None:
        """Say that values beyond the width of the keys come to nothing."""
        got = self.output(sizes)
        if got is None or bool(got[..., sizes.width :].any()) or not bool(got[..., : sizes.width].any()):
            return None
        which = f"channels {sizes.width} to {sizes.values - 1}"
        return f"{which} of the output are 0: values beyond the width of the keys are cut off"

    def read(self, sizes: Sizes) -> Read | None:
        """Return the weights that it uses, read out by values that are 1 at one key of one sample and head."""
        q, k, v = self.inputs(sizes)
        shape = (sizes.batch, sizes.heads, sizes.queries, sizes.batch, sizes.groups, sizes.keys)
        weights = torch.zeros(shape, dtype=torch.float64)
        for b in range(sizes.batch):
            for g in range(sizes.groups):
                for s in range(sizes.keys):
                    value = torch.zeros_like(v)
                    value[b, g, s] = 1
                    got = self.output(sizes, value)
                    if got is None or not bool(got.isfinite().all()):
                        return None
                    weights[..., b, g, s] = got.mean(-1)
        whole = self.output(sizes)
        if whole is None:
            return None
        again = torch.einsum("bhtcgs,cgse->bhte", weights, v.double())
        slack = 1e-9 if self.dtype == torch.float64 else 1e-4
        if bool(((again - whole).abs() > slack * (1 + whole.abs().max())).any()):
            return None  # not linear in the values
        allow = self.allowed(sizes)
        scores = q.double() @ k.double().repeat_interleave(sizes.heads // sizes.groups, 1).transpose(-2, -1)
        scores = scores * self.scale(sizes)
        cap = self.case.subject.fact("soft_cap")
        return Read(
            weights, cap * (scores / cap).tanh() if cap else scores,
            torch.ones_like(scores, dtype=torch.bool) if allow is None else allow.expand(scores.shape),
            mask=self.mask(sizes), is_causal=sizes.causal, scale=self.scale(sizes), width=sizes.width,
            values=sizes.values, soft_cap=cap, has_sink=bool(self.case.subject.fact("sink")), slack=slack,
            cross=q.double() @ k.double().repeat_interleave(sizes.heads // sizes.groups, 1).transpose(-2, -1),
        )  # fmt: skip


def _with(sizes: Sizes, axis: str, length: int) -> Sizes:
    if axis == "both":
        return replace(sizes, queries=length, keys=length)
    if axis == "keys":
        return replace(sizes, keys=length)
    return replace(sizes, queries=length, keys=length + 1)
