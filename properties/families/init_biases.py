"""Initial biases: zero, where a scheme is declared."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties.engine.case import Case
from veriformer.properties.engine.premises import needs_fact, needs_part
from veriformer.properties.engine.property import holds


@holds(
    "init.biases",
    statement="Under the declared scheme of initialisation every bias starts at zero.",
    formula="b_0 = 0",
    source="Radford et al. 2018, section 4.1, and their code; documented bug IN09.",
    kinds=("self_attention", "cross_attention", "feed_forward", "layer", "encoder", "decoder", "encoder_decoder",
           "classifier"),
    level="extended",
    unless=(needs_part("build"), needs_fact("init", "gpt2")),
    examples_factor=0.1,
    catches=("IN09",),
)  # fmt: skip
def biases_start_at_zero(case: Case) -> None:
    """A bias that nobody thought of keeps torch's default, uniform within 1/sqrt(fan_in). Spoken of are the biases of
    linear maps, of attention and of norms. Xavier's scheme names matrices alone, and many who follow it leave biases
    at torch's default.
    """
    built = case.built(dtype=torch.float32, raw=True)
    if not isinstance(built.module, nn.Module):
        case.does_not_apply("it is no module, so it has no initial weights")
    found = {
        f"{path}.{name}".lstrip("."): (part, parameter.detach())
        for path, part in built.module.named_modules()
        if isinstance(part, nn.Linear | nn.LayerNorm | nn.MultiheadAttention)
        for name, parameter in part.named_parameters(recurse=False)
        if name in ("bias", "in_proj_bias")
    }
    if not found:
        case.does_not_apply("none of its linear maps and norms has a bias")
    for name, (part, bias) in found.items():
        case.require(
            (bias == 0).all(),
            f"{name} does not start at zero",
            got=f"numbers from {bias.min():.4g} to {bias.max():.4g}",
            expected="0 everywhere",
            cause=lambda part=part, bias=bias: _scheme(part, bias),  # type: ignore[misc]
        )
    case.witness()


def _scheme(part: nn.Module, bias: Tensor) -> str | None:
    if isinstance(part, nn.Linear):
        bound = part.in_features**-0.5
        if float(bias.abs().max()) <= bound * (1 + 1e-6) and float(bias.abs().max()) > bound / 2:
            return "the bias keeps torch's default, uniform within 1/sqrt(fan_in): the scheme forgot it"
    if float((bias - bias[0]).abs().max()) == 0:
        return f"the bias is set to {float(bias[0]):.4g}"
    return "the bias is drawn at random, as matrices are"
