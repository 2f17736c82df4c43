"""Dropout: none in eval mode, the configured rate in train mode, right on average, modes that change back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.measured import judges_in_float64
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.quantising import rounds_its_numbers
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.derivatives.dropped_masks import wrong_dropped_gradient
from veriformer.properties.diagnosis.unsteady import DropoutLines
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.dropout_modes import bent_behind, masks_are_drawn_anew, modes_part, scale_cause
from veriformer.properties.probes.directions import Directions
from veriformer.properties.probes.dropping.dropouts import DropoutWatch, MaskWatch
from veriformer.properties.probes.dropping.kept import wrong_factors
from veriformer.properties.probes.dropping.scores import scores_dropped
from veriformer.properties.probes.module_parts import drop_paths
from veriformer.properties.subject.inputs import Inputs, ordinary
from veriformer.properties.subject.paths import Path

_SUBLAYERS = ("attention", "feed_forward", "self_attention", "cross_attention")
_KINDS = (*_SUBLAYERS, "layer", "encoder", "decoder", "encoder_decoder", "classifier")
_SRIVASTAVA = "Srivastava et al. 2014, section 10 (inverted dropout); torch.nn.Dropout."


def _made(case: Case, rate: float, like: Built | None = None) -> Built:
    """Return a model of its own with a rate of dropout; the weights depend on the sizes alone.

    Args:
        case: draws the sizes, and the dtype unless `like` has one.
        rate: of dropout.
        like: a model of the same dtype.
    """
    dtype = case.dtype() if like is None else like.dtype
    built = case.bench.pool.fresh(replace(case.config(), dropout=rate), dtype)
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no module, so it has no train mode")
    return built


def _inputs(case: Case, built: Built) -> Inputs:
    return ordinary(case.subject, built.config, case.generator, built.dtype)


def _call(case: Case, built: Built, inputs: Inputs, *, training: bool, seed: int = 0) -> Tensor:
    """Call in train or eval mode with a seeded generator; the global state is left as it was."""
    devices = [case.bench.device] if case.bench.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        reseed(seed)
        tensors = [x.to(case.bench.device) for x in inputs.tensors]
        return case.call(built, *tensors, *inputs.extras, path=Path(mode="no_grad", training=training)).clone()


def _must_drop(case: Case, built: Built, inputs: Inputs) -> None:
    """Stop where a rate of one half makes no difference: the subject does not hand the rate on."""
    first, second = (_call(case, built, inputs, training=True, seed=seed) for seed in (1, 2))
    if torch.equal(first, second):
        case.does_not_apply("building it with dropout=0.5 changes nothing in train mode")


def _must_draw_nothing_else(case: Case, built: Built, inputs: Inputs) -> None:
    """Stop where train mode is random without dropout too: the noise of a router, say, has no mean to keep."""
    without = _made(case, 0.0, built)
    first, second = (_call(case, without, inputs, training=True, seed=seed) for seed in (1, 2))
    if not torch.equal(first, second):
        case.does_not_apply("train mode is random without dropout too, so that the mean over masks says nothing")


def _must_hand_on(case: Case, built: Built, without: Built, inputs: Inputs) -> None:
    """Stop where the rate that it is built with makes no difference: from the same seeds the same is dropped."""
    seeds = range(1, 9)  # where whole branches are dropped, one seed may keep them all
    if all(torch.equal(*(_call(case, m, inputs, training=True, seed=n) for m in (built, without))) for n in seeds):
        case.does_not_apply("the rate of dropout that it is built with makes no difference in train mode")


_BY_DESIGN = ("structure", "other")
"""What to declare where a place has a rate of its own."""


@holds(
    "dropout.eval-deterministic",
    statement="In eval mode a model built with dropout is the model without.",
    formula="eval: f_p(x) = f_0(x), every time",
    source=_SRIVASTAVA,
    kinds=_KINDS,
    unless=needs_part("build"),
    examples_factor=0.5,
    catches=("DR01",),
)
def eval_mode_drops_nothing(case: Case) -> None:
    """Inverted dropout scales in train mode, so eval mode has nothing to do. A fused attention takes its rate as a
    number and drops whatever the mode, unless it is told.
    """
    with_dropout = _made(case, 0.5)
    without = _made(case, 0.0, with_dropout)
    inputs = _inputs(case, with_dropout)
    expected = _call(case, without, inputs, training=False)
    for seed in (1, 2):
        got = _call(case, with_dropout, inputs, training=False, seed=seed)
        case.close(got, expected, "eval mode gives another output with dropout=0.5 than without dropout",
                   cause=lambda: _eval_cause(case, with_dropout, inputs))  # fmt: skip
    case.witness()


def _eval_cause(case: Case, built: Built, inputs: Inputs) -> str:
    first, second = (_call(case, built, inputs, training=False, seed=seed) for seed in (1, 2))
    if not torch.equal(first, second):
        with DropoutLines() as watch:
            _call(case, built, inputs, training=False, seed=1)
        return watch.told() if watch.seen else "dropout acts in eval mode"
    return "outputs are scaled in eval mode: not the inverted dropout that the weights were made for"


@holds(
    "dropout.mode-cycle",
    statement="Train, eval and train again: each mode does what it did before.",
    formula="eval f(x) the same before and after train mode; train mode still drops after eval mode",
    source="torch.nn.Module.train and eval set a flag and nothing else.",
    kinds=_KINDS,
    unless=needs_part("build"),
    examples_factor=0.5,
    catches=("DR02",),
)
def modes_can_be_changed_back(case: Case) -> None:
    """Neither mode may leave something behind: a rate set to zero, running statistics, a cache."""
    built = _made(case, 0.5)
    inputs = _inputs(case, built)
    before = _call(case, built, inputs, training=False)
    dropped = [_call(case, built, inputs, training=True, seed=seed) for seed in (1, 2)]
    after = _call(case, built, inputs, training=False)
    case.close(after, before, "eval mode gives another output after a pass in train mode")
    again = [_call(case, built, inputs, training=True, seed=seed) for seed in (1, 2)]
    for now, was in zip(again, dropped, strict=True):
        case.close(now, was, "train mode gives another output after eval mode, from the same seed",
                   cause=lambda: _stuck(again))  # fmt: skip
    case.witness()


def _stuck(again: list[Tensor]) -> str | None:
    return "dropout stays off after eval mode" if torch.equal(again[0], again[1]) else None


@holds(
    "dropout.zero",
    statement="With a rate of zero train mode is eval mode.",
    formula="p = 0: f_train(x) = f_eval(x)",
    source=_SRIVASTAVA,
    kinds=_KINDS,
    level="extended",
    unless=needs_part("build"),
    examples_factor=0.5,
)
def no_rate_no_dropout(case: Case) -> None:
    """Speaks of models that hand `dropout` on; what still differs is a rate written into the code, as a defect or for a
    head of its own: a question. Noise that is added in train mode (a router's, say) is no dropout: it makes no mask
    that eval mode does not make.
    """
    half = _made(case, 0.5)
    if any(rate > 0 for _, _, rate in drop_paths(half.module)):
        case.does_not_apply("stochastic depth acts in train mode, whatever the rate of dropout")
    inputs, built = _inputs(case, half), _made(case, 0.0, half)
    _must_hand_on(case, half, built, inputs)
    expected = _call(case, built, inputs, training=False)
    got = _call(case, built, inputs, training=True)
    if _adds_noise(case, built, inputs):
        case.does_not_apply("train mode adds noise, which is no dropout")
    written = None if torch.equal(got, expected) else _hard_coded(case, built, inputs)
    if written and case.subject.fact("structure") == "other":
        case.does_not_apply("a rate of its own is written into the code")
    case.close(got, expected, "train mode with dropout=0 is not eval mode",
               cause=lambda: written or modes_part(case, built, partial(_call, case, built, inputs)),
               asks=_BY_DESIGN if written else None)  # fmt: skip
    case.witness()


def _adds_noise(case: Case, built: Built, inputs: Inputs) -> bool:
    """Whether train mode is random and yet makes no more masks than eval mode."""
    first, second = (_call(case, built, inputs, training=True, seed=seed) for seed in (1, 2))
    if torch.equal(first, second):
        return False
    counts = []
    for training in (True, False):
        with MaskWatch() as watch:
            _call(case, built, inputs, training=training)
        counts.append(watch.count)
    return counts[0] == counts[1]


def _hard_coded(case: Case, built: Built, inputs: Inputs) -> str | None:
    first, *others = (_call(case, built, inputs, training=True, seed=seed) for seed in range(1, 9))
    if all(torch.equal(first, other) for other in others):  # few channels may well be dropped alike twice
        return None
    own = [f"{name} ({part.p:g})" for name, part in built.module.named_modules()
           if isinstance(part, nn.modules.dropout._DropoutNd) and part.p]  # fmt: skip
    return "a rate of dropout is written into the code" + (f": {', '.join(own[:3])}" if own else "")


@holds(
    "dropout.mean",
    statement="On average over masks a sublayer with dropout gives what it gives without.",
    formula="E_mask[f_train(x)] = f_eval(x) where a linear map follows the dropout",
    source=_SRIVASTAVA,
    kinds=_SUBLAYERS,
    level="extended",
    unless=(needs_part("build"), excludes_fact("drop_path_scaled", False)),
    examples_factor=0.3,
    catches=("DR04",),
)
def the_mean_over_masks_is_the_output(case: Case) -> None:
    """2,048 copies of one sample, each with masks of its own; the mean must lie within 8 standard errors, which for
    a few dozen sums of bounded terms leaves less than 1e-9 for a false alarm.
    """
    rate, copies = case.choice("p", (0.5, 0.2)), 2048
    built = _made(case, rate)
    one = _inputs(case, built)
    _must_drop(case, built, one)
    _must_draw_nothing_else(case, built, one)
    spread = Inputs([x[:1].expand(copies, *x.shape[1:]) for x in one.tensors], one.extras)
    got = _call(case, built, spread, training=True, seed=case.integer("mask", 0, 9)).double()
    single = Inputs([x[:1] for x in one.tensors], one.extras)
    expected = _call(case, built, single, training=False).double()
    error = got.std(dim=0, keepdim=True) / copies**0.5
    bound = 8 * error + 64 * case.tolerance(built) * size_of(expected)
    mean = got.mean(dim=0, keepdim=True)
    if bool(((mean - expected).abs() > bound).any()) and (bent := bent_behind(partial(_call, case, built, one))):
        case.does_not_apply(f"{bent} follows a dropout: the mean of what is not linear is another one")
    case.close(mean, expected, "the mean over many masks is not the output without dropout",
               bound=bound, cause=lambda: scale_cause(mean, expected, rate))  # fmt: skip
    case.witness()


@holds(
    "dropout.places",
    statement="In train mode every dropout has the configured rate; in eval mode none acts.",
    formula="train: all rates = p, at one place at least; eval: none",
    source="Vaswani et al. 2017, section 5.4: one rate for sublayers and embeddings.",
    kinds=_KINDS,
    level="extended",
    unless=needs_part("build"),
    examples_factor=0.3,
    catches=("DR01",),
)
def every_place_has_the_rate(case: Case) -> None:
    """Seen by intercepting torch's dropout and fused attention. What is dropped of attention is weights: a score that
    is set to 0 before the softmax hides nothing. What is kept is divided by the share that is, by whatever code. A
    subject whose places differ by design passes one rate to all of them, or is not spoken of.
    """
    rate = 0.375
    built = _made(case, rate)
    inputs = _inputs(case, built)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    run = case.caller(built, *tensors, *inputs.extras, path=Path(mode="no_grad"))
    scores = case.apply(scores_dropped, built.module, run)
    case.equal(scores, [], "dropout acts on scores, before the softmax, instead of on the weights behind it",
               got=f"scores of shape {scores[0] if scores else ()}", expected="none", asks=_BY_DESIGN,
               cause=lambda: "in train mode a dropped score is 0 before the softmax, which hides nothing: weights are "
               "what is to be dropped")  # fmt: skip
    without = _made(case, 0.0, built)
    masks_are_drawn_anew(case, built.module, run, partial(_call, case, without, inputs))
    _must_hand_on(case, built, without, inputs)
    factors = [] if case.subject.fact("structure") == "other" else (
        case.apply(wrong_factors, built.module, run, rate)
    )  # fmt: skip
    case.equal(factors, [], "what a dropout keeps is not divided by the share that it keeps",
               got=f"times {factors[0] if factors else 1:.4g}", expected=f"times {1 / (1 - rate):.4g}", asks=_BY_DESIGN,
               cause=lambda: f"what is kept is multiplied by {factors[0]:.4g}, not by 1 / (1 - p)")  # fmt: skip
    _the_stream_is_kept(case, built, inputs)
    training, evaluating = (case.apply(rates_that_act, built.module, mode, run) for mode in (True, False))
    if not training:
        case.does_not_apply("no torch dropout acts in train mode when it is built with a rate")
    case.equal(evaluating, [], "dropout acts in eval mode", got=f"{len(evaluating)} places", expected="none")
    other = case.apply(other_rates, training, rate)
    if other and case.subject.fact("structure") == "other":
        case.does_not_apply("a rate of its own is written into the code")
    case.equal(other, [], "a dropout has another rate than the configured one", got=f"rates {other}",
               expected=f"{rate} at all {len(training)} places", asks=_BY_DESIGN)  # fmt: skip
    case.witness()


def _the_stream_is_kept(case: Case, built: Built, inputs: Inputs) -> None:
    """Require that a layer with its norms before gives no zeros in train mode: the stream beside a branch is kept."""
    subject = case.subject
    if subject.kind != "layer" or subject.fact("norm_placement") != "pre" or subject.fact("residual", True) is False:
        return
    dropped = _call(case, built, inputs, training=True, seed=3)
    share = (dropped == 0).double().mean()
    case.require(
        share == 0,
        "in train mode numbers of the residual stream are dropped",
        got=f"{float(share):.1%} of the output is 0",
        expected="x + dropout(f(x)), in which nothing is 0",
        asks=_BY_DESIGN,
        cause=lambda: "dropout acts on the sum of a branch and the stream, not on the branch",
    )


def other_rates(rates: list[float], rate: float) -> list[float]:
    """Return the rates that are not the right one, each once."""
    return sorted({r for r in rates if r != rate})


def rates_that_act(module: nn.Module, training: bool, run: Callable[[], object]) -> list[float]:
    """Return the rate of every dropout that acts in a call, in train mode or in eval mode."""
    with DropoutWatch() as watch, torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module.train(training)
        try:
            run()
        finally:
            module.eval()
    return watch.seen


@holds(
    "dropout.gradient",
    statement="With dropout the backward takes the mask of the forward.",
    formula="<grad f_m(x), v> = (f_m(x + h v) - f_m(x - h v)) / 2h + O(h^2), mask m from one seed, in float64",
    source="Srivastava et al. 2014, section 4: what is dropped gets no gradient; documented bug EX02.",
    kinds=_KINDS,
    level="extended",
    unless=(needs_part("build"), excludes_fact("quantised")),
    examples_factor=0.25,
    requires=("gradients.gradcheck",),
    catches=("EX02",),
)
def the_backward_drops_the_same(case: Case) -> None:
    """The gradient of the parameters (of the inputs where there are none), with the generator set to one seed before
    each call. Steps get smaller where a kink lies between, as in gradients.gradcheck.
    """
    if not judges_in_float64(case.bench):
        case.does_not_apply("it does not compute in float64, where a difference quotient means something")
    built = case.bench.pool.fresh(replace(case.config(), dropout=0.5), torch.float64)
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no module, so it has no train mode")
    inputs = _inputs(case, built)
    _must_drop(case, built, inputs)
    leaves: list[Tensor] = [p for p in built.module.parameters() if p.requires_grad and p.numel()]
    if not leaves:
        inputs.tensors[:] = [x.to(case.bench.device).requires_grad_(x.is_floating_point()) for x in inputs.tensors]
        leaves = [x for x in inputs.tensors if x.requires_grad]
    weight: list[Tensor] = []

    def value() -> Tensor:
        with torch.random.fork_rng(devices=[case.bench.device] if case.bench.device.type == "cuda" else []):
            reseed(5)
            tensors = [x.to(case.bench.device) for x in inputs.tensors]
            output = case.call(built, *tensors, *inputs.extras, path=Path(training=True))
        weight[:] = weight or [case.normal(*output.shape, dtype=torch.float64)]
        return (output * weight[0]).sum()

    output = value()
    built.module.train()  # as in the forward: what is checkpointed is computed again here
    try:
        gradients = torch.autograd.grad(output, leaves, allow_unused=True)
    finally:
        built.module.eval()
    zero, tried = torch.zeros((), dtype=torch.float64, device=case.bench.device), []
    draw = Directions(case, built, [*(x.to(case.bench.device) for x in inputs.tensors), *inputs.extras], leaves)
    for step in (1e-6, 1e-7, 1e-8):
        directions = draw()
        claimed = sum(((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None), start=zero)
        quotient = _quotient(value, leaves, directions, step)
        tried.append(((claimed - quotient).abs() / quotient.abs().clamp(min=1.0), claimed, quotient))
        if bool(tried[-1][0] < 1e-5):
            break
    error, claimed, quotient = min(tried, key=lambda one: float(one[0].nan_to_num(nan=torch.inf)))
    case.require(error < 1e-5, "with dropout the gradient is not the derivative of the output",
                 got=f"{claimed:.8g}", expected=f"{quotient:.8g}", error=error, tolerance=1e-5,
                 unit="what is expected, at least 1",
                 cause=lambda: rounds_its_numbers(built, value) or wrong_dropped_gradient(case))  # fmt: skip
    case.witness()


def _quotient(value: Callable[[], Tensor], leaves: list[Tensor], directions: list[Tensor], step: float) -> Tensor:
    """Return the central difference quotient of `value` along `directions`; the leaves are put back."""
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for leaf, direction in zip(leaves, directions, strict=True):
                leaf.add_(direction, alpha=sign * step)
            ends.append(value().detach())
        for leaf, direction in zip(leaves, directions, strict=True):
            leaf.add_(direction, alpha=step)
    return (ends[0] - ends[1]) / (2 * step)
