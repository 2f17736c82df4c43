"""Initial weights, by the name of the scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from veriformer.reference.config import Config

Generators = Callable[[str], torch.Generator | None]
"""The generator for the parameter of a name: one for all, or one each, so that models of different parts share the
initial weights of the parts that they share."""

Initializer = Callable[[nn.Module, Config, Generators], None]


def xavier(model: nn.Module, config: Config, generators: Generators) -> None:
    """Uniform with variance 2 / (fan_in + fan_out) and zero biases (Glorot & Bengio 2010); embeddings N(0, 1/D)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generators(f"{name}.weight"))
            _zero_bias(module)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=config.d_model**-0.5, generator=generators(f"{name}.weight"))


def gpt2(model: nn.Module, config: Config, generators: Generators) -> None:
    """N(0, 0.02^2), over sqrt(2N) where a map writes into the residual stream (Radford et al. 2019, section 2.3)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            writes = name.endswith(("o_proj", "feed_forward.down"))
            std = 0.02 * ((2 * config.num_layers) ** -0.5 if writes else 1.0)
            nn.init.normal_(module.weight, std=std, generator=generators(f"{name}.weight"))
            _zero_bias(module)


def _zero_bias(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def torch_default(model: nn.Module, config: Config, generators: Generators) -> None:
    """Leave what torch.nn chose."""


INITS: Mapping[str, Initializer] = {"xavier": xavier, "gpt2": gpt2, "default": torch_default}
"""Schemes by the name in `Config.init`."""
