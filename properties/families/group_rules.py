"""By which rule parameters came into the wrong group or none, found by making the groups of a changed model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

_MOST = 4  # stacks without which groups are made again


def overwritten_cause(
    module: nn.Module, lost: list[str], without: Callable[[str], tuple[set[str], set[str]]]
) -> str | None:
    """Say that parameters stand in no group since those of another stack of layers with these numbers are there.

    Args:
        module: that has the parameters.
        lost: names of those that stand in no group.
        without: returns, for the path of a stack, all names of a model that has it without layers, and those of them
            that stand in no group.
    """
    stacks: defaultdict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and (split := _numbered(name)):
            stacks[split[0]][split[1]].add(name)
    missing = set(lost)
    if not missing or any(_numbered(name) is None for name in lost):
        return None
    own = [path for path, layers in stacks.items() if any(names & missing for names in layers.values())]
    numbers = {number for path in own for number, names in stacks[path].items() if names & missing}
    others = [path for path, layers in stacks.items() if path not in own and numbers <= set(layers)]
    for other in others[:_MOST]:
        names, still = without(other)
        back = {path for path in own if not still & {n for layer in stacks[path].values() for n in layer}}
        if not back or not missing <= names:
            continue
        order = list(stacks)
        earlier = [path for path in own if order.index(path) < order.index(other)]
        words = "are overwritten by" if earlier == own else "give way to"
        return (
            f"groups are kept by the number of the layer alone (or by the name behind its stack): those of "
            f"{' and '.join(own)} {words} those of {other}, and {len(lost)} parameters of {' and '.join(own)} are in "
            f"no group and so never trained ({lost[0]}, say); without the layers of {other} those of "
            f"{' and '.join(sorted(back))} are all in groups"
        )
    return None


def axes_cause(module: nn.Module, decaying: list[str], flattened: Callable[[list[str]], set[str]]) -> str | None:
    """Say that gains decay for the number of their axes: with one axis they do not.

    Args:
        module: that has the parameters.
        decaying: names of those that decay wrongly.
        flattened: returns, for names of parameters, those that decay wrongly in a model where these have one axis.
    """
    if any(module.get_parameter(name).ndim < 2 for name in decaying) or flattened(decaying) & set(decaying):
        return None
    shapes = dict.fromkeys(str(list(module.get_parameter(name).shape)) for name in decaying)
    return (
        f"they are kept as {' and '.join(list(shapes)[:2])}, and a rule by the number of axes (p.dim() >= 2, say) "
        "takes them for matrices: as vectors they do not decay"
    )


def without_layers(module: nn.Module, path: str) -> None:
    """Take all layers out of a stack of a model, in place."""
    module.get_submodule(path)._modules.clear()


def with_one_axis(module: nn.Module, names: list[str]) -> None:
    """Lay the numbers of parameters along one axis, in place; such a model is not called any more."""
    with torch.no_grad():
        for name in names:
            parameter = module.get_parameter(name)
            parameter.data = parameter.data.flatten()


def _numbered(name: str) -> tuple[str, str] | None:
    """Return the path of a stack and the layer's number in it, of the name of a parameter; None without a number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
    return (".".join(parts[:at]), parts[at]) if at else None
