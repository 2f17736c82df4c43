"""positional-encodings: the sinusoidal table of one dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from veriformer.properties.subject.subject import Subject


def build_sinusoidal(config: Any) -> nn.Module:
    """Return the encoding of one dimension for the drawn width."""
    from positional_encodings.torch_encodings import PositionalEncoding1D

    return PositionalEncoding1D(config.d_model)


def table(model: Any, length: int) -> Any:
    """Return the table `[T, D]`."""
    return model(torch.zeros(1, length, model.org_channels))[0]


SHIPPED = {
    "sinusoidal": Subject(kind="positions", name="positional-encodings PositionalEncoding1D", build=build_sinusoidal,
                          forward=table, declares={"positions": "sinusoidal", "layout": "interleaved"}),
}  # fmt: skip
