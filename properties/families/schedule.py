"""Learning rates by step, and which parameters decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.asking import answer_to
from veriformer.properties.causes.registered import (
    decay_cause,
    is_bias_of_several,
    lost_cause,
    mixed_cause,
    twice_cause,
)
from veriformer.properties.causes.structure import off_the_record
from veriformer.properties.definitions.rounding import epsilon
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_part
from veriformer.properties.engine.property import holds
from veriformer.properties.families.group_rules import axes_cause, overwritten_cause, with_one_axis, without_layers
from veriformer.properties.formulas.schedules import Rates, wrong_falls
from veriformer.properties.subject.subject import Subject

_KIND = ("schedule",)
_BOUND = 16 * epsilon(torch.float32)
"""Relative; a rate may have been computed in float32: two powers and a product."""


def _rate(case: Case, built: Built, step: int) -> float:
    value = case.ask("forward", step, built=built)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SubjectError(f"forward returned {type(value).__name__}, where a learning rate, one number, is required")
    return float(value)


def _follows(
    case: Case,
    built: Built,
    formula: Rates,
    steps: list[int],
    scale: float,
    others: Sequence[tuple[str, Rates]] = (),
) -> None:
    """Require the rates at these steps to be those of the formula, and not of others, each with what is wrong in it."""
    got = torch.tensor([_rate(case, built, step) for step in steps], dtype=torch.float64)
    expected = torch.tensor([formula(step) for step in steps], dtype=torch.float64)
    worst = int((got - expected).abs().argmax())
    case.close(
        got, expected, f"the rate at step {steps[worst]} is not that of the formula", bound=_BOUND * scale,
        constants_allowed=True, cause=lambda: _told(got, others, steps) or _offset(got, formula, steps),
    )  # fmt: skip


def _told(got: Tensor, others: Sequence[tuple[str, Rates]], steps: list[int]) -> str | None:
    """Name the one wrong formula that gives these rates."""
    fits = [
        words
        for words, wrong in others
        if torch.allclose(got, torch.tensor([wrong(step) for step in steps], dtype=torch.float64), rtol=1e-5, atol=1e-9)
    ]
    return fits[0] if len(fits) == 1 else None


def _offset(got: Tensor, formula: Rates, steps: list[int]) -> str | None:
    for words, move in (("the step before", -1), ("the step after", 1)):
        moved = torch.tensor([formula(max(step + move, 0)) for step in steps], dtype=torch.float64)
        if torch.allclose(got, moved, rtol=1e-5):
            return f"the rates are those of {words}: steps are counted from another number"
    right = torch.tensor([formula(step) for step in steps], dtype=torch.float64)
    wrong = [step for step, same in zip(steps, torch.isclose(got, right, rtol=1e-5).tolist(), strict=True) if not same]
    peak = steps[int(right.argmax())]
    if wrong and len(wrong) < len(steps) and max(wrong) <= peak:
        return "the rates are right from the peak on: the rise is another one"
    if wrong and len(wrong) < len(steps) and formula(min(wrong)) == formula(max(wrong) + 1):
        return "the rates are right until the end, and go on past the end where the floor is reached"
    ratio = got / torch.tensor([formula(step) for step in steps], dtype=torch.float64)
    spread = float(ratio.max() - ratio.min())
    return f"all rates are {float(ratio[0]):.4g} times those of the formula" if spread < 1e-5 else None


def _has_no_peak(subject: Subject) -> str | None:
    """Apply to the paper's schedule, and to others whose peak is declared."""
    if subject.fact("schedule") == "other":
        return needs_fact("peak")(subject) or needs_fact("total_steps")(subject)
    return needs_fact("schedule", "noam")(subject) or needs_fact("warmup_steps")(subject)


def _stays_below_its_peak(case: Case, built: Built) -> None:
    """Hold the rates of a schedule of one's own, at some steps and around the end of its warm-up, to 0 and the peak."""
    peak, total = float(case.subject.fact("peak")), int(case.subject.fact("total_steps"))
    warmup = int(case.subject.fact("warmup_steps", 0))
    around = {0, max(warmup - 1, 0), warmup, warmup + 1, total, case.integer("step", 0, total)}
    steps = sorted(around | {*range(0, total + 1, max(1, total // _PLACES))})
    rates = torch.tensor([_rate(case, built, step) for step in steps], dtype=torch.float64)
    case.require(
        rates.isfinite().all() & (rates.min() >= 0), "a rate is negative, NaN or infinite", got=f"{rates.min():.4g}"
    )
    case.require(
        rates.max() <= peak * (1 + _BOUND),
        f"the rate at step {steps[int(rates.argmax())]} of {total} is above the declared peak",
        got=f"{rates.max():.6g}",
        expected=f"{peak:.6g} at most",
        error=rates.max() / peak - 1,
        tolerance=_BOUND,
        cause=lambda: _jump(rates, steps, peak),
    )
    case.witness()


def _jump(rates: Tensor, steps: list[int], peak: float) -> str | None:
    """Say where the rate goes beyond its peak."""
    above = (rates > peak * (1 + _BOUND)).nonzero().flatten().tolist()
    if not above:
        return None
    first, last = above[0], above[-1]
    before = f", from {float(rates[first - 1]):.6g} at step {steps[first - 1]}" if first else ""
    return (
        f"from step {steps[first]} to {steps[last]} the rate is above the peak: it is {float(rates[first]):.6g}{before}"
    )


_PLACES = 16


@holds(
    "schedule.warmup",
    statement="The rate is d_model^-0.5 min(step^-0.5, step warmup^-1.5), highest at the end of the warm-up; of "
    "another schedule no rate is above the declared peak.",
    formula="r(s) = d^-0.5 min(s^-0.5, s w^-1.5), s >= 1; peak at s = w; finite and positive at s = 0 and 1",
    source="Vaswani et al. 2017, 5.3; documented bugs OP01, OP02.",
    kinds=_KIND,
    unless=_has_no_peak,
    examples_factor=0.5,
    catches=("OP01", "OP02"),
)
def the_noam_rate_rises_and_falls(case: Case) -> None:
    """Steps may be counted from 1, as in the paper, or from 0, as schedulers do. Where no sizes are given (`config`),
    d_model is not known and the rates are judged up to a factor. A step 0 must neither divide by zero nor have a rate
    of 0, which would waste it.
    """
    built = case.built(dtype=torch.float32)
    if case.subject.fact("schedule") == "other":
        _stays_below_its_peak(case, built)
        return
    warmup = int(case.subject.fact("warmup_steps"))
    peak = max(warmup, 1)

    def noam(step: int) -> float:
        rise = step * warmup**-1.5 if warmup else math.inf
        return float(min(step**-0.5, rise))

    late = [_rate(case, built, 4 * peak + offset) for offset in (0, 1)]
    from_zero = (
        abs(late[1] / late[0] / (noam(4 * peak + 2) / noam(4 * peak + 1)) - 1)
        < abs(late[1] / late[0] / (noam(4 * peak + 1) / noam(4 * peak)) - 1)
        and abs(_rate(case, built, peak - 1) / max(_rate(case, built, peak), 1e-300) - noam(peak) / noam(peak + 1))
        < 1e-6
    )
    moved = 1 if from_zero else 0
    sized = case.subject.build is not None or case.subject.config is not None
    factor = float(case.subject.fact("peak", 1.0)) * built.config.d_model**-0.5
    if not sized:
        factor = _rate(case, built, peak - moved) / noam(peak)

    def formula(step: int) -> float:
        return factor * noam(step + moved)

    steps = sorted({1, 2, max(peak - 1, 1), peak, peak + 1, case.integer("step", 1, 4 * warmup + 8)})

    def since(more: int) -> Rates:
        """Return the rates by the steps since the end of the warm-up."""
        highest = formula(max(peak - moved, 1))
        return lambda s: formula(s) if s + moved <= peak else highest * max(s + moved - peak + more, 1) ** -0.5

    told = "behind the warm-up the steps since its end stand under the root, not all steps"
    _follows(case, built, formula, steps, formula(max(peak - moved, 1)), [(told, since(n)) for n in (0, 1)])
    around = [_rate(case, built, max(step - moved, 1)) for step in (peak - 1, peak, peak + 1)]
    rates = torch.tensor(around, dtype=torch.float64)
    case.require(rates.max() <= rates[1] * (1 + _BOUND), "the rate is not highest at the end of the warm-up",
                 got=", ".join(f"{rate:.6g}" for rate in around), expected="the middle one highest")  # fmt: skip
    first = torch.tensor(_rate(case, built, 0), dtype=torch.float64)
    if case.subject.fact("first_step", 0) == 0:
        case.require(first.isfinite() & (first > 0), "the rate at step 0 is not a positive number", got=f"{first:.4g}",
                     expected="> 0", cause=lambda: "the first update is wasted" if first == 0 else None,
                     asks=("first_step", 1))  # fmt: skip
    case.witness()


def _falling(case: Case, fall: Callable[[float], float]) -> None:
    subject, built = case.subject, case.built(dtype=torch.float32)
    warmup, total = int(subject.fact("warmup_steps", 0)), int(subject.fact("total_steps"))
    peak, floor = float(subject.fact("peak")), float(subject.fact("floor", 0.0))

    def formula(step: int) -> float:
        u = min(1.0, (step - warmup) / max(1, total - warmup))
        return floor + (peak - floor) * fall(u)

    others = wrong_falls(fall, warmup, total, peak, floor)
    later = sorted({warmup, warmup + 1, (warmup + total) // 2, total, total + 5, case.integer("step", warmup, total)})
    _follows(case, built, formula, later, peak, others)
    steps = range(0, warmup + 1, max(1, warmup // 16))
    rising = torch.tensor([_rate(case, built, step) for step in steps], dtype=torch.float64)
    before, after = rising[:-1], rising[1:] * (1 + _BOUND)
    case.require(
        ((before >= 0) & (before <= after) & (after <= peak * (1 + 2 * _BOUND))).all(),
        "the rate does not rise through the warm-up",
        got=", ".join(f"{rate:.3g}" for rate in rising[:8].tolist()),
    )
    case.witness()


@holds(
    "schedule.cosine",
    statement="After the warm-up the rate falls from the peak to the floor along half a cosine, and stays there.",
    formula="r = floor + (peak - floor) (1 + cos(pi u)) / 2, u = (s - w) / (S - w) in [0, 1]",
    source="Loshchilov & Hutter 2017, equation 5.",
    kinds=_KIND,
    level="extended",
    unless=(needs_fact("schedule", "cosine"), needs_fact("total_steps"), needs_fact("peak")),
    examples_factor=0.5,
)
def the_rate_falls_along_a_cosine(case: Case) -> None:
    """How it rises is a matter of taste, as long as it does; past the last step it must not rise again."""
    _falling(case, lambda u: (1 + math.cos(math.pi * u)) / 2)


@holds(
    "schedule.linear",
    statement="After the warm-up the rate falls in a straight line from the peak to the floor, and stays there.",
    formula="r = floor + (peak - floor) (1 - u), u = (s - w) / (S - w) in [0, 1]",
    source="Devlin et al. 2019, appendix A.2.",
    kinds=_KIND,
    level="extended",
    unless=(needs_fact("schedule", "linear"), needs_fact("total_steps"), needs_fact("peak")),
    examples_factor=0.5,
)
def the_rate_falls_in_a_line(case: Case) -> None:
    """How it rises is a matter of taste, as long as it does; a negative rate past the end would unlearn."""
    _falling(case, lambda u: 1 - u)


def _groups(case: Case, built: Built) -> list[dict[str, Any]]:
    groups = case.ask("forward", built=built)
    fits = isinstance(groups, list | tuple) and all(isinstance(g, dict) and "params" in g for g in groups)
    if not fits:
        raise SubjectError("forward did not return a list of groups with 'params', as an optimiser takes it")
    return groups


@holds(
    "schedule.decay-groups",
    statement="Every parameter stands in exactly one group; biases and the gains of norms do not decay, matrices do.",
    formula="union of groups = parameters, disjoint; weight_decay(g) = 0 for biases and norms, > 0 for matrices",
    source="documented bug OP04: names that do not match.",
    kinds=("parameter_groups",),
    level="extended",
    unless=needs_part("build"),
    examples_factor=0.25,
    catches=("OP04",),
)
def norms_and_biases_do_not_decay(case: Case) -> None:
    """A parameter in two groups is stepped twice, one in none is never trained. What is a norm is told by the module
    that owns the parameter (its name has "norm" in it), what is a bias by its number of axes. Tables of embeddings may
    decay or not, tied ones too.
    """
    built = case.built(dtype=torch.float32, raw=True)
    groups = _groups(case, built)
    lost, twice, decaying, still = case.apply(misplaced, built.module, groups)
    case.equal(lost, [], "a parameter stands in no group", got=", ".join(lost[:3]), expected="every one in a group",
               cause=lambda: _overwritten(case, built, lost) or lost_cause(built.module, lost, groups))  # fmt: skip
    case.equal(twice, [], "a parameter stands in two groups", got=", ".join(twice[:3]), expected="in one",
               cause=lambda: twice_cause(built.module, twice))  # fmt: skip

    def decay(names: list[str], decays: bool) -> str | None:
        why = _by_axes(case, built, names) if decays else None
        return mixed_cause(built.module, names, groups) or decay_cause(built.module, names, decays=decays, why=why)

    case.equal(decaying, [], f"{decaying[0][0] if decaying else ''} decays",
               got=f"weight_decay {decaying[0][1] if decaying else 0:g}", expected="0",
               cause=lambda: decay([name for name, _ in decaying], True))  # fmt: skip
    case.equal(still, [], f"{still[0] if still else ''} does not decay", got="weight_decay 0", expected="> 0",
               cause=lambda: decay(still, False))  # fmt: skip
    case.witness()


def _made_anew(case: Case, built: Built, change: Callable[[nn.Module], None]) -> tuple[set[str], set[str], set[str]]:
    """Return all names of a changed model, those in no group, and those that decay wrongly."""
    fresh = case.bench.pool.fresh(built.config, built.dtype, raw=True)
    change(fresh.module)
    lost, _, decaying, _ = misplaced(fresh.module, _groups(case, fresh))
    return {name for name, _ in fresh.module.named_parameters()}, set(lost), {name for name, _ in decaying}


def _overwritten(case: Case, built: Built, lost: list[str]) -> str | None:
    def without(path: str) -> tuple[set[str], set[str]]:
        return _made_anew(case, built, lambda module: without_layers(module, path))[:2]

    with off_the_record(case):
        return answer_to(lambda: overwritten_cause(built.module, lost, without))


def _by_axes(case: Case, built: Built, decaying: list[str]) -> str | None:
    def flattened(names: list[str]) -> set[str]:
        return _made_anew(case, built, lambda module: with_one_axis(module, names))[2]

    with off_the_record(case):
        return answer_to(lambda: axes_cause(built.module, decaying, flattened))


def misplaced(
    module: nn.Module, groups: list[dict[str, Any]]
) -> tuple[list[str], list[str], list[tuple[str, float]], list[str]]:
    """Return the parameters that stand in no group, that stand in two, that decay, and that do not, wrongly.

    Args:
        module: that has them.
        groups: as an optimiser takes them.
    """
    owner = {id(p): part for part in module.modules() for p in part.parameters(False)}
    tables = {id(p) for part in module.modules() if isinstance(part, nn.Embedding) for p in part.parameters(False)}
    names = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    listed = [(id(p), p, float(group.get("weight_decay", 0.0))) for group in groups for p in group["params"]]
    keys = [key for key, _, _ in listed]
    lost = [name for key, name in names.items() if key not in keys]
    twice = [names.get(key, "?") for key in set(keys) if keys.count(key) > 1]
    decaying, still = [], []
    for key, parameter, decay in listed:
        part = owner.get(key)
        is_norm = "norm" in type(part).__name__.lower() or isinstance(part, nn.LayerNorm | nn.RMSNorm)
        if (is_norm or parameter.ndim < 2 or is_bias_of_several(names.get(key, ""), parameter, part)) and decay != 0:
            decaying.append((names.get(key, "?"), decay))
        elif not is_norm and key not in tables and not decay > 0 and is_matrix(names.get(key, "?"), parameter, part):
            still.append(names.get(key, "?"))
    return lost, twice, decaying, still


def is_matrix(name: str, parameter: Tensor, part: nn.Module | None) -> bool:
    """Return whether inputs are multiplied with a parameter: it is of a linear map, or held by itself and named so."""
    if isinstance(part, nn.Linear):
        return parameter.ndim >= 2
    last, whole = name.rpartition(".")[2].lower(), f"{name} {type(part).__name__}".lower()
    is_table = any(word in last for word in ("pos", "token", "scale", "gain", "norm", "bias"))
    is_table |= any(word in whole for word in ("embed", "table", "codebook"))
    return parameter.ndim == 2 and min(parameter.shape) > 1 and last.endswith(("weight", "kernel")) and not is_table
