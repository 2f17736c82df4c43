"""How a script builds a model of drawn sizes, and draws its weights anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from veriformer.properties.bench.pool import WEIGHT_SEED
from veriformer.properties.counterexamples.program import MADE


def making_of(body: str, models: Sequence[Any], *, redrawn: bool, in_short: bool) -> str:
    """Return the source of the function that builds a model of drawn sizes, as far as a body calls for it.

    Args:
        body: source that calls it.
        models: that were built.
        redrawn: whether their weights are drawn anew.
        in_short: whether the short source of `redrawing_of` does that, or else `redraw_weights`.
    """
    raw, placed, other = (f"{word}=" in body for word in ("redrawn", "device", "seed"))
    takes = ", redrawn=True" * raw + ', device="cpu"' * placed + f", seed={WEIGHT_SEED}" * other
    ready = f"model{'.to(device)' * placed}.to(dtype).eval()"
    if (in_short or not redrawn) and all(isinstance(model, nn.Module) for model in models):
        built = ready.replace("model", "build(config)", 1)
        anew = f"redrawn_to_unit_gain({built})" if redrawn else built
        gives = [f"    return {anew}"]
        if redrawn and raw:
            gives = [f"    model = {built}", "return redrawn_to_unit_gain(model) if redrawn else model"]
        return "\n    ".join(
            [
                f"def {MADE}(config, dtype{takes}):",
                "with torch.random.fork_rng(devices=[]):",
                f"    torch.manual_seed({'seed' if other else WEIGHT_SEED})",
                *gives,
            ]
        )
    after = [f"model = {ready}", *["if redrawn:"] * (redrawn and raw)]
    anew = "redrawn_to_unit_gain(model)" if in_short else f"redraw_weights(model, {WEIGHT_SEED})"
    after += [f"{'    ' * raw}{anew}"] * redrawn
    if all(isinstance(model, nn.Module) for model in models):
        built = [
            f"        {ready.replace('model', 'model = build(config)', 1)}",
            *(f"    {line}" for line in after[1:]),
        ]
    else:  # of functions there is nothing to be placed
        built = ["        model = build(config)", "    if isinstance(model, torch.nn.Module):"]
        built += [f"        {line}" for line in after]
    return "\n".join(
        [
            f"def {MADE}(config, dtype{takes}):",
            "    with torch.random.fork_rng(devices=[]):",
            f"        torch.manual_seed({'seed' if other else WEIGHT_SEED})",
            *built,
            "    return model",
        ]
    )


_REDRAWING = """def redrawn_to_unit_gain(model):  # the small weights of a fresh model hide errors
    generator = torch.Generator().manual_seed({seed})
    tables = {{id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}}
    for p in model.parameters():
        noise, old = torch.randn(p.shape, generator=generator, dtype=torch.float64), p.detach().double()
        value = old * (1 + 0.25 * noise.clamp(-2, 2)) + 0.05 * noise
        if p.ndim >= 2:
            value = noise if id(p) in tables else noise / p[0].numel() ** 0.5
        elif (old == old[0]).all() and old[0] in (0, 1):
            value = 1 + 0.25 * noise.clamp(-2, 2) if old[0] else 0.25 * noise
        p.data.copy_(value)
    return model"""


def redrawing_of(models: Sequence[Any]) -> str:
    """Return a short source of what `redraw_weights` does, which gives models the same weights; "" where none does."""
    modules = [part for model in models if isinstance(model, nn.Module) for part in model.modules()]
    parameters = [p for part in modules for p in part.parameters(recurse=False)]
    usual = all(
        p.is_floating_point() and p.numel() and p.ndim and p.requires_grad and p.device.type == "cpu"
        for p in parameters
    )
    others = [m for m in modules if type(m).__name__ == "Conv1D" or getattr(m, "padding_idx", None) is not None]
    return _REDRAWING.format(seed=WEIGHT_SEED) if usual and not others else ""
