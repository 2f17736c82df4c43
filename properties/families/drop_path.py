"""Stochastic depth: whole changes of whole samples, dropped at the configured rate, right on average."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.pool import Built
from veriformer.properties.definitions.chance import binomial_interval
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.probes.module_parts import drop_paths, layer_lists, silence
from veriformer.properties.subject.inputs import ordinary
from veriformer.properties.subject.paths import Path
from veriformer.properties.subject.sizes import DrawnConfig

SAMPLES = 4096
FALSE_ALARM = 1e-9

_EQUAL, _TIMES = 64, 8
"""Equal samples in a call, and calls: where a whole batch is dropped at once, eight calls show several outcomes."""

_MOST = 8
"""Outcomes of three branches, each of them kept or dropped; entries dropped one by one have as many as samples."""

_RATE = re.compile(r"drop_?path|drop_?prob|stochastic_?depth")
_OF_TWO = 4
"""Outcomes of two branches, each kept or dropped by itself."""
_NEAR = 0.1
"""By which a share of 512 samples is near another one."""

_FEW, _CALLS, _SKIPPED = 3, 64, 20
"""Equal samples, calls, and outcomes: four branches that are skipped as one for a whole batch have sixteen at most."""

_NEARLY = 1e-4
"""Share of the root mean square by which equal samples of a batch may differ: rounding in float32, and far more."""


@holds(
    "droppath.expectation",
    statement="Stochastic depth drops whole samples at its rate p and scales the rest by 1 / (1 - p); eval drops none.",
    formula="train: y_b = x_b k_b / (1 - p), k_b ~ Bernoulli(1 - p), so E y = x; eval: y = x",
    source="Huang et al. 2016, section 3; documented bug DR04.",
    kinds=("feed_forward", "layer", "encoder", "decoder", "encoder_decoder", "classifier"),
    level="extended",
    unless=needs_module,
    examples_factor=0.25,
    catches=("DR04", "DR05"),
)
def stochastic_depth_is_right_on_average(case: Case) -> None:
    """The modules are told by their names (DropPath, StochasticDepth) and called by themselves, with the samples where
    the model has them: the expectation passes through no nonlinearity. Of a layer that drops its branches by itself
    many equal samples show it. An implementation that does not scale declares `drop_path_scaled=False`.
    """
    built = case.bench.pool.fresh(_at_a_rate(case), torch.float32)
    parts = [(name, part, rate) for name, part, rate in drop_paths(built.module) if rate > 0]
    if not parts:
        branches_are_scaled(case, built)
        return
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    run = case.caller(built, *tensors, *inputs.extras, path=Path(mode="no_grad"))
    unused = case.apply(never_called, built.module, [name for name, _, _ in parts], run)
    case.equal(
        unused,
        [],
        f"{', '.join(unused)} is never called in train mode",
        got="no call",
        expected="every stochastic depth acts on a branch",
        cause=lambda: "another branch's stochastic depth is used in its place",
    )
    if (layers := _layers(case, built)) and case.subject.fact("residual", True):
        dropped = case.apply(streams_dropped, built.module, layers, [name for name, _, _ in parts], run)
        case.equal(
            dropped,
            [],
            f"{', '.join(dropped)} drops the stream itself",
            got="what is dropped is there where all sublayers are silent",
            expected="x + drop(f(x)): the stream is kept",
            cause=lambda: "stochastic depth acts on the sum of a branch and the stream, not on the branch",
        )
    name, part, rate = parts[case.integer("part", 0, len(parts) - 1)]
    axis = case.apply(axis_of_samples, built.module, name, run, len(tensors[0]))
    x = 1 + case.normal(SAMPLES, 2, 3, dtype=torch.float32).abs()
    x = x.transpose(0, axis).contiguous()
    with torch.random.fork_rng(devices=[case.bench.device] if case.bench.device.type == "cuda" else []):
        reseed(case.integer("drop seed", 0, 9999))
        part.train()
        share = case.bench.call(part, x.clone()) / x
        part.eval()
        still = case.bench.call(part, x.clone())
    case.exact(still, x, f"{name} changes its input in eval mode")
    kept = 1 / (1 - rate) if case.subject.fact("drop_path_scaled", True) else 1.0
    share = share.transpose(0, axis)
    first = share[:, :1, :1]
    case.close(share, first.expand_as(share), f"{name} drops parts of a sample", bound=8 * epsilon(x.dtype) * kept,
               constants_allowed=True, cause=lambda: _parts_cause(share, axis))  # fmt: skip
    values = first.flatten()
    is_zero = values == 0
    case.close(values[~is_zero], torch.full_like(values[~is_zero], kept), f"{name} does not scale what it keeps",
               bound=8 * epsilon(x.dtype) * kept, constants_allowed=True,
               cause=lambda: _scaled_cause(float(values.max()), rate, kept))  # fmt: skip
    dropped = is_zero.sum()
    low, high = binomial_interval(FALSE_ALARM, SAMPLES, rate)
    case.require((low <= dropped) & (dropped <= high), f"{name} does not drop samples at its rate {rate:g}",
                 got=f"{int(dropped)} of {SAMPLES}", expected=f"{low:.0f} to {high:.0f}",
                 cause=lambda: _rate_cause(int(dropped) / SAMPLES, rate))  # fmt: skip
    case.witness()


def _rate_cause(share: float, rate: float) -> str | None:
    """Say which slip drops this share of samples."""
    known = (
        (1 - rate, f"samples are kept with the probability {rate:g}, at which they should be dropped: the comparison "
                   "with the drawn number, or what is rounded down, is turned round"),
        (rate**2, f"samples are dropped at the square of the rate, {rate**2:.4g}: two draws must both say so"),
        (1 - (1 - rate) ** 2, "samples are dropped twice over: either of two draws drops them"),
        (rate / 2, "samples are dropped at half of the rate"),
        (min(1.0, 2 * rate), "samples are dropped at twice the rate"),
    )  # fmt: skip
    within = 4 * (share * (1 - share) / SAMPLES) ** 0.5
    return next((words for other, words in known if abs(share - other) <= within and other != rate), None)


def _scaled_cause(factor: float, rate: float, kept: float) -> str:
    """Say by what is scaled what is kept, and which slip gives this number."""
    known = (
        (1.0, "it is not scaled at all: no division by 1 - p, or one whose result goes nowhere"),
        (1 - rate, "it is multiplied by the share that is kept, 1 - p, and not divided by it"),
        (1 / rate, "it is divided by the share that is dropped, p, and not by the one that is kept, 1 - p"),
        (rate, "it is multiplied by the share that is dropped, p"),
        (1 / (1 - rate), "it is divided by the share that is kept, 1 - p"),
        (1 / (1 - rate) ** 2, "it is divided by the share that is kept, 1 - p, twice"),
        (1 / (1 + rate), "it is divided by 1 + p"),
    )
    fits = [words for number, words in known if abs(factor - number) < 1e-3 * number and abs(number - kept) > 1e-3]
    told = f"what is kept is scaled by {factor:.4g}, not by {kept:.4g}"
    return f"{told}: {fits[0]}" if fits else told


def _layers(case: Case, built: Built) -> list[str]:
    """Return the names of the layers of a model; "" alone for a layer itself."""
    if case.subject.kind == "layer":
        return [""]
    listed = {id(m) for layers in layer_lists(built.module, built.config) for m in layers}
    return [name for name, m in built.module.named_modules() if id(m) in listed]


def streams_dropped(model: nn.Module, layers: list[str], names: list[str], run: Callable[[], object]) -> list[str]:
    """Return the stochastic depths that are given something though all sublayers bring nothing.

    Args:
        model: whose layers are silent for one call, in eval mode.
        layers: their names.
        names: of the modules of stochastic depth.
        run: calls the model.
    """
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    given: set[str] = set()

    def note(name: str, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor) and bool(args[0].abs().amax() > 1e-6):
            given.add(name)

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda part, args, name=name: note(name, args))
        for name in names
    ]
    training = [(part, part.training) for part in model.modules()]
    try:
        for name in layers:
            silence(model.get_submodule(name))
        model.eval()
        run()
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(kept[name])
        for part, was in training:
            part.training = was
    return [name for name in names if name in given]


def _parts_cause(share: Tensor, axis: int) -> str | None:
    """Say what is drawn in place of whole samples, of shares `[B, ...]` that were dropped or kept."""
    dropped = share == 0
    for other in (1, 2):
        rows = dropped.transpose(0, other)
        if bool((rows == rows[:, :1, :1]).all()):
            where = "step of time" if other == axis == 1 else f"place along axis {other}"
            return f"one decision is drawn for each {where}, the same for all samples: the axes are confused"
    if bool((dropped == dropped[..., :1]).all()):
        return "one decision is drawn for each position of each sample, not for the sample"
    return "every entry is drawn by itself, as in dropout"


def axis_of_samples(model: nn.Module, name: str, run: Callable[[], object], batch: int) -> int:
    """Return the axis along which a part of a model is given its samples: the second where time stands first.

    Args:
        model: whose part is called.
        name: of the part.
        run: calls the model on as many samples as no other axis of a part has.
        batch: how many.
    """
    shapes: list[torch.Size] = []

    def note(part: nn.Module, args: tuple[object, ...]) -> None:
        shapes.extend(x.shape for x in args[:1] if isinstance(x, Tensor))

    hook = model.get_submodule(name).register_forward_pre_hook(note)
    try:
        with torch.no_grad():
            run()
    finally:
        hook.remove()
    if not shapes or len(shapes[0]) != 3 or shapes[0][0] == batch or list(shapes[0]).count(batch) != 1:
        return 0
    return list(shapes[0]).index(batch)


def branches_are_scaled(case: Case, built: Built) -> None:
    """Judge stochastic depth without a module of its own, by what becomes of many equal samples of a layer.

    Whole branches that are dropped leave few outcomes; were those that are kept not scaled, the outcome of eval mode
    would be among them. Two outcomes are those of a layer that is skipped as one (LayerDrop, Fan et al. 2020), which
    scales nothing; more than `_MOST` come of dropout of entries.
    """
    none = "no stochastic depth of a rate above 0 is found in it"
    if isinstance(built.module, nn.Module):
        samples_are_drawn_apart(case, built)
    if case.subject.kind != "layer" or not isinstance(built.module, nn.Module):
        case.does_not_apply(none)
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    x = inputs.tensors[0][:1].expand(_EQUAL, -1, -1).contiguous().to(case.bench.device)

    def run(seed: int, *, training: bool = True) -> Tensor:
        with torch.random.fork_rng(devices=[case.bench.device] if case.bench.device.type == "cuda" else []):
            reseed(seed)
            path = Path(mode="no_grad", training=training)
            return case.call(built, x, *inputs.tensors[1:], *inputs.extras, path=path).clone()

    rows = run(0)
    if len(outcomes(rows)) > _MOST or torch.equal(rows, run(1)):
        case.does_not_apply(none)
    still = run(0, training=False)[:1]
    every = torch.cat([rows, *(run(seed) for seed in range(1, _TIMES))])
    found = case.apply(outcomes, every)
    if case.subject.fact("drop_path_scaled", True) is False or not 2 < len(found) <= _MOST:
        case.does_not_apply(none)
    case.witness()
    nearest = found[(found - still).abs().flatten(1).amax(1).argmin()]
    case.differs(
        nearest,
        still[0],
        "branches that are kept in train mode are what they are in eval mode, though others are dropped",
        cause=lambda: "what is kept is not divided by the share kept",
        asks=("drop_path_scaled", False),
    )
    _at_their_rate(case, built, x, found, every)


def samples_are_drawn_apart(case: Case, built: Built) -> None:
    """Require that equal samples of a batch part where calls do: what is dropped is drawn for each sample.

    Whole layers that are skipped for a batch (LayerDrop) have few outcomes; what is drawn for each position has many.
    """
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x[:1].expand(_FEW, *x.shape[1:]).contiguous().to(case.bench.device) for x in inputs.tensors]
    run = case.caller(built, *tensors, *inputs.extras, path=Path(mode="no_grad", training=True))
    assert isinstance(built.module, nn.Module)
    first, second = case.apply(seeded_calls, built.module, run, 2)
    if len(outcomes(first)) > 1 or torch.equal(first, second):
        return
    still = case.bench.pool.fresh(replace(built.config, dropout=0.0), torch.float32)
    if not isinstance(still.module, nn.Module) or case.subject.build is None:
        return
    again = case.caller(still, *tensors, *inputs.extras, path=Path(mode="no_grad", training=True))
    one, two = seeded_calls(still.module, again, 2)
    if not torch.equal(one, two):
        return  # what is drawn is not drawn at the rate: tokens that are left out in training, say
    every = case.apply(seeded_calls, built.module, run, _CALLS)
    if any(len(outcomes(rows)) > 1 for rows in every):
        return
    count = case.apply(number_of_outcomes, every[:, 0], _CALLS)
    case.require(
        count <= _SKIPPED,
        f"equal samples of a batch are alike in train mode, and {_CALLS} calls give {int(count)} outcomes",
        got=f"{int(count)} outcomes",
        expected="samples that part, as each has draws of its own",
        asks=("batch_coupled", True),
        cause=lambda: (
            "one draw decides for all samples of a batch, and for each position by itself: the axis that the draw has "
            "is that of time, not that of the samples (time stands first, say)"
        ),
    )


def _at_their_rate(case: Case, built: Built, x: Tensor, found: Tensor, rows: Tensor) -> None:
    """Require that two branches, each dropped by itself, are both dropped as often as the rate that a layer keeps says.

    Both are where the output is the stream alone: with a probability of the square of the rate.
    """
    own = {
        float(value)
        for part in built.module.modules()
        for label, value in vars(part).items()
        if _RATE.search(label) and isinstance(value, float) and 0 < value < 1
    }
    if len(own) != 1 or len(found) != _OF_TWO or not any(torch.equal(one, x[0]) for one in found):
        return
    rate = own.pop()
    both = case.apply(alike, rows, x[0])
    low, high = binomial_interval(FALSE_ALARM, len(rows), rate**2)
    inverted = abs(int(both) / len(rows) - (1 - rate) ** 2) < _NEAR
    case.require(
        (low <= both) & (both <= high),
        f"branches are not dropped at the rate {rate:g} that the layer keeps",
        got=f"both are dropped in {int(both)} of {len(rows)} samples",
        expected=f"{low:.0f} to {high:.0f}, {rate:g}^2 of them",
        cause=lambda: (
            f"branches are kept with the probability {rate:g}, not dropped: the comparison is turned round" * inverted
            or None
        ),
    )


def alike(rows: Tensor, one: Tensor) -> Tensor:
    """Return how many of rows `[N, ...]` are another one `[...]`."""
    return (rows == one).flatten(1).all(1).sum()


def outcomes(rows: Tensor, most: int = _MOST) -> Tensor:
    """Return rows `[N, ...]` without those that are another one's again, up to rounding; few more than so many."""
    nearly = _NEARLY * float(rows.square().mean().sqrt())
    found: list[Tensor] = []
    while len(rows) and len(found) <= most:
        found.append(rows[0])
        rows = rows[(rows - rows[0]).abs().flatten(1).amax(1) > nearly]
    return torch.stack(found)


def seeded_calls(model: nn.Module, run: Callable[[], Tensor], count: int) -> Tensor:
    """Return what some calls in train mode give, `[N, B, ...]`, each with a seed of its own."""
    made = []
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.train()
        for seed in range(count):
            torch.manual_seed(seed)
            made.append(run().detach().clone())
        model.eval()
    return torch.stack(made)


def number_of_outcomes(rows: Tensor, most: int) -> Tensor:
    """Return how many of rows `[N, ...]` are no other one's again, at most one more than so many."""
    return torch.tensor(len(outcomes(rows, most)))


def _at_a_rate(case: Case) -> DrawnConfig:
    """Return the drawn sizes with a rate of dropout above 0, which stochastic depth may follow."""
    config = case.config()
    return config if config.dropout > 0 or "dropout" in case.subject.domain else replace(config, dropout=0.2)


def never_called(model: nn.Module, names: list[str], run: Callable[[], object]) -> list[str]:
    """Call a model in train mode and return the names of the parts that it does not call, if it calls others."""
    called: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_hook(lambda part, args, output, name=name: called.add(name))
        for name in names
    ]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.train()
        try:
            run()
        finally:
            model.eval()
            for hook in hooks:
                hook.remove()
    return [name for name in names if called and name not in called]
