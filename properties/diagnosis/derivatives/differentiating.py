"""A subject called at chosen sizes in float64, its gradient there, and the derivative that the gradient must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.engine.attending import hides_keys_alone
from veriformer.properties.engine.case import Case
from veriformer.properties.probes.untrained_rows import trained_places
from veriformer.properties.subject.paths import DEFAULT, Path

LIMIT = 1e-5  # relative; quotients with steps of 1e-6 err by some 1e-8
_STEPS = (1e-6, 1e-7, 1e-8)  # smaller ones where a kink may lie between


@dataclass(frozen=True)
class Sizes:
    """What a subject is called on.

    Attributes:
        batch: B.
        queries: T.
        keys: S, of what has two sequences.
        heads: H, of attention alone.
        groups: G, of attention alone; 0: as many as heads.
        width: K, of attention alone.
        mask: "", "mask" (some hidden), "causal" (the flag) or "empty": query 1, or sample 1 of a module, sees nothing.
        config: number of the sizes that the model is built with; None: those of the case.
        rate: of dropout in train mode; 0: eval mode.
    """

    batch: int = 1
    queries: int = 4
    keys: int = 4
    heads: int = 2
    groups: int = 0
    width: int = 4
    mask: str = ""
    config: int | None = None
    rate: float = 0.0


@dataclass
class Setting:
    """One way to call a subject, and what its output is differentiated by.

    Attributes:
        built: the model, its own.
        run: calls it; the same every time.
        leaves: by name: inputs, then parameters.
        inputs: how many of the leaves are inputs.
        numbers: what a factor may be made of, by name.
        allow: `[B, 1, T, S]`, what attention may attend to.
        args: what it is called on.
        is_training: whether it is called in train mode.
    """

    built: Built
    run: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    inputs: int
    numbers: dict[str, float]
    allow: Tensor | None = None
    args: list[Tensor] = field(default_factory=list)
    is_training: bool = False
    _weight: Tensor | None = None
    _places: dict[str, Tensor] | None = None

    def places(self) -> dict[str, Tensor]:
        """Return, of each leaf, 0 where torch gives no gradient by design; empty where it does everywhere."""
        if self._places is None:
            tokens = [x for x in self.args if not x.is_floating_point()]
            embeds = bool(tokens) and self.inputs == 0
            found = trained_places(self.run, tokens, *self.leaves.values()) if embeds else []
            self._places = dict(zip(self.leaves, found, strict=False))
        return self._places

    def weight(self, output: Tensor) -> Tensor:
        """Return the incoming gradient, the same for all calls."""
        if self._weight is None:
            generator = torch.Generator().manual_seed(11)
            self._weight = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
        return self._weight

    def output(self) -> Tensor:
        """Return the output, without a graph."""
        return self.run().detach()

    def value(self) -> Tensor:
        """Return the output times the incoming gradient, summed."""
        output = self.run()
        return (output * self.weight(output)).sum()

    def gradients(self, factor: float = 1.0, value: Tensor | None = None) -> dict[str, Tensor | None]:
        """Return what the subject gives as gradient of `factor` times the value; None where it has none."""
        total = (self.value() if value is None else value) * factor
        if not total.requires_grad:
            return dict.fromkeys(self.leaves)
        with _Training(self.built, self.is_training):  # what is checkpointed is computed again here
            found = torch.autograd.grad(total, list(self.leaves.values()), allow_unused=True)
        return {
            name: None if g is None else (g.to_dense() if g.is_sparse else g).detach()
            for name, g in zip(self.leaves, found, strict=True)
        }

    def direction(self, name: str, seed: int) -> Tensor:
        """Return a direction for one leaf."""
        leaf = self.leaves[name]
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
        return drawn * self.places()[name] if name in self.places() else drawn

    def quotient(self, directions: dict[str, Tensor], step: float = _STEPS[0]) -> float:
        """Return the derivative of the value along some directions, as a difference quotient."""
        ends = []
        with torch.no_grad():
            for sign in (1.0, -1.0):
                kept = {name: self.leaves[name].detach().clone() for name in directions}
                for name, direction in directions.items():
                    self.leaves[name].add_(direction, alpha=sign * step)
                ends.append(float(self.value().detach()))
                for name, value in kept.items():
                    self.leaves[name].copy_(value)
        return (ends[0] - ends[1]) / (2 * step)

    def derivative(self, name: str) -> Tensor:
        """Return the whole derivative by one leaf, entry by entry."""
        leaf = self.leaves[name]
        found = torch.zeros_like(leaf, requires_grad=False).flatten()
        for place in range(leaf.numel()):
            one = torch.zeros_like(found)
            one[place] = 1.0
            found[place] = self.quotient({name: one.view(leaf.shape)})
        return found.view(leaf.shape)

    def is_right(self, names: list[str] | None = None, gradients: dict[str, Tensor | None] | None = None) -> bool:
        """Whether the gradient is the derivative, along two directions of all these leaves together."""
        chosen = list(self.leaves) if names is None else names
        given = self.gradients() if gradients is None else gradients
        return all(self._agrees(chosen, given, seed) for seed in (1, 2))

    def wrong(self, gradients: dict[str, Tensor | None] | None = None) -> list[str]:
        """Return the leaves whose gradient is not the derivative."""
        given = self.gradients() if gradients is None else gradients
        none = [name for name, g in given.items() if g is None]
        missing = none if none and not self._agrees(none, given, 3) else []
        found = {*missing, *self._wrong_among([name for name in self.leaves if name not in none], given)}
        return [name for name in self.leaves if name in found]

    def _wrong_among(self, names: list[str], given: dict[str, Tensor | None]) -> list[str]:
        """Return those that are wrong: halves that are right together are not looked into."""
        if not names or self._agrees(names, given, 3):
            return []
        middle = len(names) // 2
        if not middle:
            return names
        return self._wrong_among(names[:middle], given) + self._wrong_among(names[middle:], given)

    def _agrees(self, names: list[str], given: dict[str, Tensor | None], seed: int) -> bool:
        least = 1e-3 * size_of(self.weight(self.output())) if self._weight is None else 1e-3 * size_of(self._weight)
        for attempt, step in enumerate(_STEPS):
            directions = {name: self.direction(name, seed + 10 * attempt) for name in names}
            claimed = sum(float((g * directions[n]).sum()) for n in names if (g := given[n]) is not None)
            wanted = self.quotient(directions, step)
            if abs(claimed - wanted) <= LIMIT * max(abs(wanted), least):
                return True
        return False

    def ratio(self, name: str, gradients: dict[str, Tensor | None] | None = None) -> float | None:
        """Return the factor by which a gradient differs from the derivative, if one number says it all."""
        given = (self.gradients() if gradients is None else gradients)[name]
        if given is None:
            return None
        found = []
        for seed in (3, 4, 5):
            direction = self.direction(name, seed)
            wanted = self.quotient({name: direction})
            found.append(float((given * direction).sum()) / wanted if wanted else float("nan"))
        middle = sorted(found)[1]
        return middle if all(abs(r - middle) <= 1e-4 * abs(middle) for r in found) else None


class _Training:
    """Keeps a model in train mode for a backward."""

    def __init__(self, built: Built, wanted: bool) -> None:
        self._module = built.module if wanted and isinstance(built.module, nn.Module) else None

    def __enter__(self) -> None:
        if self._module is not None:
            self._module.train()

    def __exit__(self, *_: object) -> None:
        if self._module is not None:
            self._module.eval()


def setting(case: Case, sizes: Sizes) -> Setting:
    """Make a setting: a model of its own in float64, and inputs of these sizes."""
    configs = case.bench.configs
    config = case.config() if sizes.config is None else configs[sizes.config % len(configs)]
    if sizes.rate:
        config = replace(config, dropout=sizes.rate)
    built = case.bench.pool.fresh(config, torch.float64)
    path = Path(training=True) if sizes.rate else DEFAULT
    args, given, names, allow = _arguments(case, built, sizes)
    leaves = {name: x.requires_grad_() for name, x in zip(names, args, strict=False) if x.is_floating_point()}
    inputs = len(leaves)
    if isinstance(built.module, nn.Module):
        leaves |= {n: p for n, p in built.module.named_parameters() if p.is_floating_point() and p.requires_grad}
    extras = (-1,) if case.subject.kind == "softmax" and case.subject.accepts("dim") else ()

    def run() -> Tensor:
        with torch.random.fork_rng(devices=[case.bench.device] if case.bench.device.type == "cuda" else []):
            reseed(5)
            return case.call(built, *args, *extras, path=path, **given)

    return Setting(
        built, run, leaves, inputs, _numbers(case, built, args, sizes), allow, args, is_training=bool(sizes.rate)
    )


def _arguments(
    case: Case, built: Built, sizes: Sizes
) -> tuple[list[Tensor], dict[str, Any], tuple[str, ...], Tensor | None]:
    """Return the tensors of a call, its keywords, the names of the tensors, and what may be attended to."""
    kind, config, generator = case.subject.kind, built.config, torch.Generator().manual_seed(7)
    device = case.bench.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    def whole(*shape: int) -> Tensor:
        return torch.randint(0, config.vocab_size, shape, generator=generator).to(device)

    def sequence(length: int) -> Tensor:
        if case.subject.takes_tokens:
            return whole(sizes.batch, length)
        return normal(sizes.batch, length, config.d_model)

    if kind == "attention":
        own = isinstance(built.module, nn.Module) and next(built.module.parameters(), None) is not None
        heads, width = (config.num_heads, config.d_head) if own else (sizes.heads, sizes.width)
        groups = sizes.groups or heads
        args = [
            normal(sizes.batch, heads, sizes.queries, width),
            *(normal(sizes.batch, groups, sizes.keys, width) for _ in range(2)),
        ]
        allow = None
        given: dict[str, Any] = {}
        if sizes.mask == "causal":
            given = {"causal": True}
            allow = torch.ones(1, 1, sizes.queries, sizes.keys, dtype=torch.bool, device=device)
            allow = allow.tril(sizes.keys - sizes.queries)
        elif sizes.mask:
            rows = 1 if hides_keys_alone(case.subject) else sizes.queries
            allow = torch.rand(sizes.batch, 1, rows, sizes.keys, generator=generator).to(device) < 0.6
            allow[..., 0] = True
            allow[..., -1] = False
            allow = allow.expand(-1, -1, sizes.queries, -1).contiguous()
            allow[:, :, 1] &= sizes.mask != "empty"
            given = {"attention_mask": allow}
        return args, given, ("the queries", "the keys", "the values"), allow
    if kind == "loss":
        labels = whole(sizes.batch, sizes.queries)
        if sizes.mask:
            labels[:, ::2] = int(case.subject.fact("ignore_index", -100))
        return [normal(sizes.batch, sizes.queries, config.vocab_size), labels], {}, ("the logits", ""), None
    if kind == "softmax":
        return [normal(sizes.batch, 3, sizes.queries)], {}, ("the scores",), None
    if kind == "rotary":
        x = normal(sizes.batch, config.num_heads, sizes.queries, config.d_head)
        return [x, torch.arange(sizes.queries, device=device)], {}, ("the input", ""), None
    mask = torch.ones(sizes.batch, sizes.queries, dtype=torch.bool, device=device)
    mask[0, sizes.queries // 2 :] = False
    mask[1:2] &= sizes.mask != "empty"
    if kind in ("cross_attention", "encoder_decoder"):
        memory = torch.ones(sizes.batch, sizes.keys, dtype=torch.bool, device=device)
        memory[0, (sizes.keys + 1) // 2 :] = False
        memory[1:2] &= sizes.mask != "empty"
        first, second = sequence(sizes.queries), sequence(sizes.keys)
        if kind == "cross_attention":
            given = {"memory_mask": memory} if sizes.mask else {}
            return [first, second], given, ("the queries' side", "the memory"), None
        return [second, first], {"source_mask": memory} if sizes.mask else {}, ("", ""), None
    if kind == "norm":
        return [30 * sequence(sizes.queries)], {}, ("the input",), None  # so large that eps does not matter
    return [sequence(sizes.queries)], {"attention_mask": mask} if sizes.mask else {}, ("the input",), None


def _numbers(case: Case, built: Built, args: list[Tensor], sizes: Sizes) -> dict[str, float]:
    """Return what a factor may be made of."""
    config, kind = built.config, case.subject.kind
    dropped = {"(1 - p)": 1 - sizes.rate} if sizes.rate else {}
    length = {"the number of positions": sizes.queries, "the number of samples": sizes.batch}
    length["the number of tokens in the batch"] = sizes.queries * sizes.batch
    if kind == "attention":
        heads, width = args[0].shape[1], args[0].shape[-1]
        groups = args[1].shape[1]
        length = {"the number of queries": sizes.queries, "the number of samples": sizes.batch}
        grouped = {"the number of query heads of a group": heads / groups} if groups != heads else {}
        return {
            "d_head": width,
            "the number of heads": heads,
            "the number of keys": sizes.keys,
            **length,
            **grouped,
            **dropped,
        }
    if kind == "loss":
        return {"the vocabulary": config.vocab_size, **length}
    wide = {"d_model": config.d_model} if args and args[0].is_floating_point() else {}
    heads_too = {"the number of heads": config.num_heads, "d_head": config.d_head}
    return {**dropped, **length, **wide, **({} if kind in ("norm", "feed_forward", "softmax") else heads_too)}


def numbers_of(values: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Yield what a factor may be, in words, and its value."""
    for name, value in values.items():
        root = f"sqrt({name})"
        yield name, value
        yield f"1 / {name}", 1 / value
        yield root, value**0.5
        yield f"1 / {root}", value**-0.5


def factor_in_words(first: tuple[float, dict[str, float]], second: tuple[float, dict[str, float]]) -> str | None:
    """Name the form that two factors have, each with the numbers of its sizes; None where none, or several, fit.

    >>> factor_in_words((2.0, {"d_head": 4.0}), (4.0, {"d_head": 16.0}))
    'sqrt(d_head)'
    """
    one, two = dict(numbers_of(first[1])), dict(numbers_of(second[1]))
    fits = [
        words
        for words, value in one.items()
        if words in two
        and abs(value - two[words]) > 1e-6
        and abs(value - first[0]) <= 1e-4 * abs(value)
        and abs(two[words] - second[0]) <= 1e-4 * abs(two[words])
    ]
    return fits[0] if len(fits) == 1 else None
