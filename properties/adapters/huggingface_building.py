"""How small models of Hugging Face transformers are built, with random weights and without a download."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from veriformer.properties.adapters.shared.small_configuration import small_configuration

LARGEST = 4_000_000
"""Parameters of the largest model that is built: more means that a size has a name which is not known here."""


def build(model_class: Any, config_class: Any, sizes: Any, **more: Any) -> nn.Module:
    """Return a model of a class, of small sizes and random weights."""
    num_labels = {"num_labels": sizes.num_classes} if model_class.__name__.endswith("Classification") else {}
    config = small_configuration(config_class, sizes, **num_labels, **more)
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", model_class)
    _insist_on_small(make, config)
    return make(config)


def _insist_on_small(make: Callable[[Any], nn.Module], config: Any) -> None:
    """Count the parameters before any memory is taken.

    Raises:
        ValueError: there are too many.
    """
    with torch.device("meta"):
        count = sum(p.numel() for p in make(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise ValueError(f"its smallest configuration known here has {count} parameters, more than {LARGEST}")


def vision_stack(model: nn.Module) -> nn.Module:
    """Return the stack of layers inside a vision model, which takes embeddings.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules():
        if type(module).__name__.endswith("Encoder"):
            first = list(inspect.signature(module.forward).parameters)[:1]
            if first and first[0] in ("hidden_states", "inputs_embeds"):
                return module
    if isinstance(layers := getattr(model, "layers", None), nn.ModuleList):
        return nn.Sequential(*layers)
    raise TypeError(f"{type(model).__name__} has no encoder that takes embeddings")


def build_vision(model_class: Any, config_class: Any, sizes: Any) -> nn.Module:
    """Return the stack of layers of a vision model, without its patches."""
    return vision_stack(build(model_class, config_class, sizes))
