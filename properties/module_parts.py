"""Parts of a user's module, told by what they are: its norms, its list of layers, its dropouts. Always on a copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from veriformer.properties.subject import DrawnConfig


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalization: by its name, and parameters that are all vectors."""
    own = list(module.parameters(recurse=False))
    return "norm" in type(module).__name__.lower() and all(p.ndim <= 1 for p in own)


def silence(module: nn.Module) -> int:
    """Set every parameter outside the norms to zero, in place, so that sublayers bring nothing; return how many."""
    norms = {id(p) for part in module.modules() if is_norm(part) for p in part.parameters(recurse=False)}
    count = 0
    with torch.no_grad():
        for parameter in module.parameters():
            if id(parameter) not in norms and parameter.is_floating_point():
                parameter.zero_()
                count += 1
    return count


def layer_lists(module: nn.Module, config: DrawnConfig) -> list[list[nn.Module]]:
    """Return the lists of layers: `ModuleList`s of `num_layers` different modules of one class, the outermost ones."""
    found: list[list[nn.Module]] = []
    inside: set[int] = set()
    for part in module.modules():
        if id(part) in inside or not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        own = list(part._modules.values())  # as they are listed, whatever iterating over the list yields
        layers = [m for m in own if m is not None]
        alike = len({type(m) for m in layers}) == 1 and any(True for m in layers for _ in m.parameters())
        if len(layers) == config.num_layers >= 2 and alike:
            found.append(layers)
            inside |= {id(m) for m in part.modules()}
    return found


def dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield the dropout modules with their names and rates."""
    for name, part in module.named_modules():
        rate = getattr(part, "p", None)
        if isinstance(part, nn.modules.dropout._DropoutNd) and rate is not None:
            yield name, part, float(rate)
