"""Gradients: finite, and the derivative of the output."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.case import Case
from veriformer.properties.compare import size_of
from veriformer.properties.inputs import has_ordinary_inputs, ordinary
from veriformer.properties.pool import Built
from veriformer.properties.property import holds
from veriformer.properties.subject import KINDS

_KINDS = tuple(kind for kind in KINDS if has_ordinary_inputs(kind) and kind not in ("positions", "position_bias"))


def _leaves(case: Case, built: Built, tensors: list[Tensor]) -> list[Tensor]:
    """Return what the output is differentiated by: floating point inputs, and the parameters."""
    parameters = list(built.module.parameters()) if isinstance(built.module, nn.Module) else []
    inputs = [x for x in tensors if x.is_floating_point()]
    for x in inputs:
        x.requires_grad_()
    leaves = [*inputs, *(p for p in parameters if p.is_floating_point() and p.requires_grad)]
    if not leaves:
        case.does_not_apply("it has neither floating point inputs nor parameters")
    return leaves


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
    kinds=_KINDS,
    level="extended",
    examples_factor=0.5,
)
def the_gradient_is_the_derivative(case: Case) -> None:
    """Where float64 is genuine: with h = 1e-6 the quotient errs by 1e-12 of the third derivative and 1e-10 of
    rounding. A kink (ReLU, maximum) between x - h v and x + h v shows once in a great while, so the best of three
    directions counts.
    """
    if torch.float64 not in case.bench.dtypes():
        case.does_not_apply("it does not compute in float64, where a difference quotient means something")
    built = case.bench.pool.fresh(case.config(), torch.float64)
    inputs = ordinary(case.subject, built.config, case.generator, torch.float64)
    tensors = [x.to(case.bench.device).clone() for x in inputs.tensors]
    leaves = _leaves(case, built, tensors)
    output = case.call(built, *tensors, *inputs.extras)
    if not output.requires_grad:
        case.does_not_apply("its output has no gradient")
    weight = case.normal(*output.shape, dtype=torch.float64)
    gradients = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    step, best = 1e-6, (torch.inf, 0.0, 0.0, 1.0)
    for _ in range(3):
        directions = [case.normal(*leaf.shape, dtype=torch.float64) for leaf in leaves]
        claimed = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
        values = [
            _moved(case, built, tensors, inputs.extras, leaves, directions, sign * step, weight) for sign in (1, -1)
        ]
        quotient = (values[0] - values[1]) / (2 * step)
        size = max(abs(quotient), size_of(weight) * size_of(output) * output.numel() ** 0.5, 1e-12)
        error = abs(claimed - quotient) / size
        best = min(best, (error, claimed, quotient, size))
        if error < 1e-5:
            break
    case.require(
        best[0] < 1e-5,
        "the gradient is not the derivative of the output",
        got=f"{best[1]:.8g}",
        expected=f"{best[2]:.8g}",
        error=best[0],
        tolerance=1e-5,
        cause=lambda: f"the gradient is {best[1] / best[2]:.4g} times the derivative" if best[2] else None,
    )
    case.witness()


def _moved(
    case: Case, built: Built, tensors: list[Tensor], extras: Any, leaves: list[Tensor], directions: list[Tensor],
    step: float, weight: Tensor,
) -> float:  # fmt: skip
    """Return the weighted output with all leaves moved along their directions."""
    with torch.no_grad():
        for leaf, direction in zip(leaves, directions, strict=True):
            leaf.add_(direction, alpha=step)
        value = float((case.call(built, *tensors, *extras) * weight).sum())
        for leaf, direction in zip(leaves, directions, strict=True):
            leaf.sub_(direction, alpha=step)
    return value
