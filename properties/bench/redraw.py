"""Re-drawing the weights of a freshly built model, so that small initialisations cannot hide an error.

This file imports torch alone: its source is pasted into standalone scripts.
"""

from __future__ import annotations

import torch
from torch import nn


def redraw_weights(model: nn.Module, seed: int) -> None:
    """Give every parameter of `model` a new random value of unit gain, in place.

    Libraries initialise with a standard deviation of 0.02; deviations of a wrong model then shrink up to
    a thousandfold. Matrices become N(0, 1/fan_in), embeddings N(0, 1) (a padding row stays as it is), gains
    move off 1 and biases off 0, so that a forgotten or doubled one shows. Buffers and frozen parameters stay.

    Args:
        model: module whose parameters are floating point and allocated.
        seed: of the private generator; the same seed gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    padding = {id(m.weight): m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding)}
    transposed = {id(m.weight) for m in model.modules() if type(m).__name__ == "Conv1D" and hasattr(m, "weight")}
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel() or not parameter.requires_grad:
                continue  # a frozen parameter is a constant: a table of frequencies, say
            drawn = torch.float64 if parameter.numel() <= 2048 else torch.float32  # which takes a fifth of the time
            noise = torch.randn(parameter.shape, generator=generator, dtype=drawn)
            if parameter.ndim >= 2:
                fan_in = parameter.shape[0] if id(parameter) in transposed else parameter.numel() // parameter.shape[0]
                value = noise if id(parameter) in padding else noise.div_(fan_in**0.5)
            else:
                values = set(parameter.tolist() if parameter.ndim else [parameter.item()])
                if values == {0.0}:
                    value = 0.25 * noise
                else:
                    value = 1 + 0.25 * noise.clamp(-2, 2)
                    value = value if values == {1.0} else parameter.double().cpu() * value + 0.05 * noise
            if (row := padding.get(id(parameter))) is not None:
                value[row] = parameter[row].double().cpu()
            parameter.copy_(value)
