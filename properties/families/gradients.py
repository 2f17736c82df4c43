"""Gradients: finite, and the derivative of the output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from veriformer.properties.bench.isolation import reseed
from veriformer.properties.bench.measured import judges_in_float64
from veriformer.properties.bench.pool import Built
from veriformer.properties.causes.quantising import rounds_its_numbers
from veriformer.properties.definitions.differences import size_of
from veriformer.properties.diagnosis.derivatives.gradient_parts import weight_normed
from veriformer.properties.diagnosis.derivatives.gradients import wrong_gradient
from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import excludes_fact, needs_module
from veriformer.properties.engine.property import holds
from veriformer.properties.engine.stream import SEQUENCES, Stream
from veriformer.properties.probes.directions import Directions
from veriformer.properties.subject.inputs import Inputs, has_ordinary_inputs, ordinary
from veriformer.properties.subject.kinds import KINDS

_KINDS = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("positions", "position_bias"))


def _leaves(case: Case, built: Built, tensors: list[Tensor]) -> list[Tensor]:
    """Return what the output is differentiated by: floating point inputs, and the parameters."""
    parameters = list(built.module.parameters()) if isinstance(built.module, nn.Module) else []
    inputs = [x for x in tensors if x.is_floating_point()]
    for x in inputs:
        x.requires_grad_()
    leaves = [*inputs, *(p for p in parameters if p.is_floating_point() and p.requires_grad and p.numel())]
    if not leaves:
        case.does_not_apply("it has neither floating point inputs nor parameters")
    return leaves


_CONVERGED = 0.1
"""Quotients that differ by more than this part of what they differ from the claim by have no limit to compare with."""


@holds(
    "gradients.finite",
    statement="Ordinary inputs give finite gradients, of inputs and of parameters.",
    formula="|x| ordinary  =>  |d f(x) / d (x, parameters)| < inf",
    source="A NaN gradient reaches every parameter with the next step.",
    kinds=_KINDS,
)
def gradients_are_finite(case: Case) -> None:
    """Zeros, equal tokens and large values are ordinary. A root or a norm of zero, and a branch of `where` that
    divides by zero though it is not taken, give NaN in the backward alone.
    """
    built = case.built()
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    scale = case.choice("scale", (1.0, 0.0, 0.01) if built.dtype == torch.float16 else (1.0, 0.0, 0.01, 30.0))
    tensors = [(x * scale if x.is_floating_point() else x).to(case.bench.device) for x in inputs.tensors]
    leaves = _leaves(case, built, tensors)
    output = case.call(built, *tensors, *inputs.extras)
    if not output.requires_grad:
        case.does_not_apply("its output has no gradient")
    weight = case.normal(*output.shape, dtype=output.dtype)
    for gradient in torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True):
        if gradient is not None:
            case.finite(gradient, f"a gradient at inputs of scale {scale:g} is NaN or infinite")
    case.witness()


@holds(
    "gradients.gradcheck",
    statement="The gradient is the derivative: along any direction it agrees with a difference quotient.",
    formula="<grad f(x), v> = (f(x + h v) - f(x - h v)) / 2h + O(h^2), in float64",
    source="Definition of the derivative; torch.autograd.gradcheck.",
    kinds=(*_KINDS, "positions", "position_bias"),  # of a table that is learned
    level="extended",
    unless=excludes_fact("quantised"),
    examples_factor=0.5,
    farthest=129,
)
def the_gradient_is_the_derivative(case: Case) -> None:
    """Where float64 is genuine: with h = 1e-6 the quotient errs by 1e-12 of the third derivative and 1e-10 of
    rounding. A kink (ReLU, maximum) between x - h v and x + h v shows once in a great while: then another direction
    is tried with a tenth of the step, and another with a hundredth, whose rounding is still below 1e-6. Where a whole
    model is given numbers, and the gradient of these alone is wrong, it is a question: statistics may be detached.
    """
    if not judges_in_float64(case.bench):
        case.does_not_apply("it does not compute in float64, where a difference quotient means something")
    built = case.bench.pool.fresh(case.config(), torch.float64)
    inputs = ordinary(case.subject, built.config, case.generator, torch.float64)
    if case.reaches and case.subject.kind in SEQUENCES:
        stream = Stream(case, built)
        inputs = Inputs(list(stream.inputs(stream.draw(1, case.length("T")))))
    tensors = [x.to(case.bench.device).clone() for x in inputs.tensors]
    leaves = _leaves(case, built, tensors)
    output = case.call(built, *tensors, *inputs.extras)
    if not output.requires_grad:
        case.does_not_apply("its output has no gradient")
    weight = case.normal(*output.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    zero, tried = torch.zeros((), dtype=torch.float64, device=case.bench.device), []
    least = max(size_of(weight) * size_of(output) * output.numel() ** 0.5, 1e-12)
    draw = Directions(case, built, [*tensors, *inputs.extras], leaves)
    for step in (1e-6, 1e-7, 1e-8):
        directions = draw()
        claimed = sum(((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None), start=zero)
        run = case.caller(built, *tensors, *inputs.extras)
        quotient = case.apply(difference_quotient, run, leaves, directions, weight, step)
        tried.append(
            ((claimed - quotient).abs() / quotient.abs().clamp(min=least), claimed, quotient, directions, step)
        )
        if bool(tried[-1][0] < 1e-5):
            break
    error, claimed, quotient, directions, step = min(tried, key=lambda one: float(one[0].nan_to_num(nan=torch.inf)))
    if not error < 1e-5:
        nearer = case.apply(difference_quotient, run, leaves, directions, weight, step / 3)
        if bool((nearer - quotient).abs() > _CONVERGED * (claimed - quotient).abs()):
            case.reject(
                "the difference quotients of two steps are not one number: curvature, or rounding, is too large"
            )
    of_data = not error < 1e-5 and _is_of_data(case, run, leaves, gradients, weight, least)
    if of_data and case.subject.fact("structure") == "other":
        case.does_not_apply("statistics of its data are detached: its gradient is that of its parameters alone")
    case.require(
        error < 1e-5,
        "the gradient is not the derivative of the output",
        got=f"{claimed:.8g}",
        expected=f"{quotient:.8g}",
        error=error,
        unit=f"what is expected, at least {float(least):.3g}",
        tolerance=1e-5,
        cause=lambda: (
            rounds_its_numbers(built, lambda: case.call(built, *tensors, *inputs.extras))
            or wrong_gradient(case)
            or _wrong_leaves(case, built, tensors, inputs.extras, leaves, gradients, weight, draw.places)
        ),
        asks=("structure", "other") if of_data else None,
    )
    case.witness()


def _is_of_data(
    case: Case,
    run: Callable[[], Tensor],
    leaves: list[Tensor],
    gradients: tuple[Tensor | None, ...],
    weight: Tensor,
    least: float,
) -> bool:
    """Whether only the gradient of data that a whole model is given is wrong: that of the parameters is right."""
    if case.subject.inputs != "embeddings" or not any(isinstance(leaf, nn.Parameter) for leaf in leaves):
        return False
    recorder, case.bench.recorder = case.bench.recorder, None  # asked for the words of a failure alone
    try:
        generator = torch.Generator().manual_seed(0)
        moves = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) for x in leaves]
        moves = [m if isinstance(x, nn.Parameter) else 0 * m for m, x in zip(moves, leaves, strict=True)]
        quotient = difference_quotient(run, leaves, moves, weight, 1e-6)
        claimed = sum(float((g * m).sum()) for g, m in zip(gradients, moves, strict=True) if g is not None)
    finally:
        case.bench.recorder = recorder
    return bool((claimed - quotient).abs() < 1e-5 * quotient.abs().clamp(min=least))


def _wrong_leaves(
    case: Case,
    built: Built,
    tensors: list[Tensor],
    extras: tuple[Any, ...],
    leaves: list[Tensor],
    gradients: tuple[Tensor | None, ...],
    weight: Tensor,
    places: list[Tensor],
) -> str | None:
    """Name the inputs and parameters whose gradient is not the derivative: one after another moves alone."""
    names = {id(p): name for name, p in built.module.named_parameters()} if isinstance(built.module, nn.Module) else {}
    wrong = []
    for number, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        generator = torch.Generator().manual_seed(number)
        direction = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
        direction = direction * places[number] if places else direction
        still = [direction if other is leaf else torch.zeros_like(other) for other in leaves]
        run = case.caller(built, *tensors, *extras)
        quotient = float(difference_quotient(run, leaves, still, weight, 1e-6))
        claimed = 0.0 if gradient is None else float((gradient * direction).sum())
        if abs(claimed - quotient) > 1e-5 * max(abs(quotient), 1.0):
            wrong.append(names.get(id(leaf), f"input {number}"))
    if not wrong:
        return None
    told = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
    right = len(leaves) - len(wrong)
    return f"the gradient of {told} is not the derivative" + (f"; that of the {right} others is right" if right else "")


def difference_quotient(
    call: Callable[[], Tensor], leaves: list[Tensor], directions: list[Tensor], weight: Tensor, step: float
) -> Tensor:
    """Return the derivative of the weighted output along directions, by a central difference.

    Args:
        call: of the model.
        leaves: inputs and parameters; they have their own values again afterwards.
        directions: of each.
        weight: of the shape of the output.
        step: along the directions.
    """
    kept, ends = [leaf.detach().clone() for leaf in leaves], []
    with torch.no_grad():
        for sign in (1, -1):
            for leaf, value, direction in zip(leaves, kept, directions, strict=True):
                leaf.copy_(value).add_(direction, alpha=sign * step)
            ends.append((call() * weight).sum().detach())
        for leaf, value in zip(leaves, kept, strict=True):
            leaf.copy_(value)
    return (ends[0] - ends[1]) / (2 * step)


@holds(
    "gradients.double-backward",
    statement="The gradient of the gradient is its derivative, where a second backward is supported.",
    formula="d/dh <grad f(x + h v), w> = <H v, w>, in float64",
    source="Definition of the Hessian; needed by gradient penalties and second-order optimisers.",
    kinds=_KINDS,
    level="extended",
    unless=(excludes_fact("quantised"), excludes_fact("once_differentiable")),
    requires=("gradients.gradcheck",),
    examples_factor=0.25,
)
def the_second_gradient_is_a_derivative(case: Case) -> None:
    """As for the first gradient, one order up. Fused kernels often refuse a second backward: an error is right, and so
    is `once_differentiable`, even where the rest of the graph goes on; a wrong number is not. Piecewise linear subjects
    have a Hessian of zero, and the difference of gradients is zero as well.
    """
    if not judges_in_float64(case.bench):
        case.does_not_apply("it does not compute in float64, where a difference quotient means something")
    built = case.bench.pool.fresh(case.config(), torch.float64)
    inputs = ordinary(case.subject, built.config, case.generator, torch.float64)
    tensors = [x.to(case.bench.device).clone() for x in inputs.tensors]
    leaves = _leaves(case, built, tensors)
    weight: list[Tensor] = []

    def gradients(again: bool) -> list[Tensor]:
        output = case.call(built, *tensors, *inputs.extras)
        if not output.requires_grad:
            case.does_not_apply("its output has no gradient")
        if not weight:
            weight.append(case.normal(*output.shape, dtype=torch.float64))
        total = (output.square() * weight[0]).sum()  # the square: a linear subject has a second gradient too
        found = torch.autograd.grad(total, leaves, create_graph=again, allow_unused=True)
        return [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]

    first = gradients(again=True)
    draw = Directions(case, built, [*tensors, *inputs.extras], leaves)
    left, right = draw(), draw()
    if any(node.name() == _ONCE for g in first for node in _nodes(g)):
        case.does_not_apply("a backward of it is marked once_differentiable")
    projected = sum((g * w).sum() for g, w in zip(first, left, strict=True))
    if not isinstance(projected, Tensor) or not projected.requires_grad:
        case.does_not_apply("its gradient has no gradient")
    try:
        second = torch.autograd.grad(projected, leaves, allow_unused=True)
    except RuntimeError as problem:
        case.does_not_apply(f"it supports no second backward: {str(problem).splitlines()[0][:120]}")
    if all(h is None for h in second):  # as `once_differentiable` leaves it: nothing wrong is claimed
        case.does_not_apply("its gradient is cut off from its inputs: it can be differentiated once")
    zero = torch.zeros((), dtype=torch.float64, device=case.bench.device)
    claimed = sum(((h * v).sum() for h, v in zip(second, right, strict=True) if h is not None), start=zero)
    step, tried = 1e-6, []
    for scale in (1.0, 0.1):
        ends = []
        for sign in (1.0, -1.0):
            _move(leaves, right, sign * step * scale)
            moved = gradients(again=False)
            ends.append(sum(((g * w).sum().detach() for g, w in zip(moved, left, strict=True)), start=zero))
            _move(leaves, right, -sign * step * scale)
        quotient = (ends[0] - ends[1]) / (2 * step * scale)
        size = sum((g.detach().norm() * w.norm() for g, w in zip(first, left, strict=True)), start=zero)
        tried.append(((claimed - quotient).abs() / (size + quotient.abs()), quotient))
    error, quotient = min(tried, key=lambda one: float(one[0].nan_to_num(nan=torch.inf)))
    apart = (tried[0][1] - tried[1][1]).abs()
    if float(error) >= 1e-4 and float(apart) > _CONVERGED * float((claimed - quotient).abs()):
        case.reject("the difference quotients of two steps are not one number: a kink, or curvature, lies between")
    case.require(
        error < 1e-4, "the second gradient is not the derivative of the first", got=f"{claimed:.8g}",
        expected=f"{quotient:.8g}", error=error, tolerance=1e-4, unit="the sizes it is made of",
        asks=("once_differentiable", True) if (normed := weight_normed(built.module)) else None,
        cause=lambda: rounds_its_numbers(built, lambda: case.call(built, *tensors, *inputs.extras))
        or normed
        or wrong_gradient(case)
        or _hand_written(case.call(built, *tensors, *inputs.extras)),
    )  # fmt: skip
    case.witness()


_ONCE = "torch::autograd::Error"
"""The node that `once_differentiable` puts behind its gradients: it raises where it is reached, which it rarely is."""


def _nodes(output: Tensor) -> Iterator[Any]:
    """Go through the nodes of the graph behind a tensor."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [behind for behind, _ in node.next_functions]


def _hand_written(output: Tensor) -> str | None:
    """Name a backward in the graph that is written by hand: where it is not differentiable, torch cannot know."""
    own = next((type(node).__name__ for node in _nodes(output) if isinstance(node, BackwardCFunction)), None)
    if own is None:
        return None
    name = own.removesuffix("Backward")
    return (
        f"the backward of {name} is written by hand, and the second gradient passes parts of it by "
        "(declare once_differentiable=True if that is meant)"
    )


def _move(leaves: list[Tensor], directions: list[Tensor], step: float) -> None:
    with torch.no_grad():
        for leaf, direction in zip(leaves, directions, strict=True):
            leaf.add_(direction, alpha=step)


@holds(
    "gradients.checkpointing",
    statement="Computing the forward again in the backward gives the same gradients, dropout included.",
    formula="grad checkpoint(f)(x) = grad f(x), in train mode with the same random state",
    source="Chen et al. 2016; torch.utils.checkpoint; documented bug EX01.",
    kinds=_KINDS,
    level="extended",
    unless=needs_module,
    examples_factor=0.25,
    catches=("EX01",),
)
def recomputation_changes_nothing(case: Case) -> None:
    """In train mode, with dropout where the sizes have some: a subject that draws its masks from a generator of its own
    gets others the second time. Where the model has checkpointing of its own, that is tried too.
    """
    built = case.bench.pool.fresh(case.config(), case.dtype())
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no torch module")
    inputs = ordinary(case.subject, built.config, case.generator, built.dtype)
    tensors = [x.to(case.bench.device) for x in inputs.tensors]
    leaves = _leaves(case, built, tensors)

    def run() -> Tensor:
        return case.call(built, *tensors, *inputs.extras)

    def gradients(call: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        devices = [case.bench.device] if case.bench.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            reseed(7)
            built.module.train()
            try:
                output = call()
                if not output.requires_grad:
                    case.does_not_apply("its output has no gradient")
                reseed(8)  # what the backward finds
                found = torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)
            finally:
                built.module.eval()
        return output.detach(), list(found)

    expected, wanted = gradients(run)
    try:
        with set_checkpoint_early_stop(False):  # it stops by an exception, which would look like the subject's own
            # the random state of a GPU is kept for recomputation where an argument lies there
            again = gradients(lambda: checkpoint(lambda *_: run(), *tensors, *leaves, use_reentrant=False))
    except CheckpointError as problem:
        case.require(False, "the forward takes another way when it is computed again", got=str(problem)[:150])
        return
    _same_gradients(case, "recomputed", again, expected, wanted)
    switch = getattr(built.module, "gradient_checkpointing_enable", None)
    if callable(switch) and getattr(built.module, "supports_gradient_checkpointing", True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the model's own: another name for the switch, say
            switch()
        _same_gradients(case, "with gradient_checkpointing_enable()", gradients(run), expected, wanted)
    case.witness()


def _same_gradients(
    case: Case, way: str, got: tuple[Tensor, list[Tensor | None]], expected: Tensor, wanted: list[Tensor | None]
) -> None:
    case.close(got[0], expected, f"{way}, the output in train mode is another one", constants_allowed=True)
    for found, right in zip(got[1], wanted, strict=True):
        if (found is None) != (right is None):
            case.require(False, f"{way}, a gradient is missing", got="none" if found is None else "one too many")
        if found is not None and right is not None:
            case.close(found, right, f"{way}, a gradient is another one", constants_allowed=True)
