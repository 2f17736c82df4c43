"""Parts of a user's module, told by what they are: its norms, its list of layers, its dropouts. Always on a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from veriformer.properties.anatomy.norms import is_norm
from veriformer.properties.subject.sizes import DrawnConfig


def silence(module: nn.Module) -> int:
    """Set every parameter outside the norms to zero, in place, so that sublayers bring nothing; return how many."""
    found = [part for part in module.modules() if is_norm(part)]
    vectors = [all(p.ndim <= 1 for p in part.parameters()) for part in found]  # else it holds sublayers, too
    norms = {id(p) for part, whole in zip(found, vectors, strict=True) for p in part.parameters(recurse=whole)}
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
    inside: set[int] = _side_by_side(module, config.num_layers)
    for part in module.modules():
        if id(part) in inside or not isinstance(part, nn.ModuleList | nn.Sequential):
            continue
        own = list(part._modules.values())  # as they are listed, whatever iterating over the list yields
        layers = [m for m in own if m is not None]
        alike = len({type(m) for m in layers}) == 1 and any(p.ndim >= 2 for m in layers for p in m.parameters())
        if len(layers) == config.num_layers >= 2 and alike:
            found.append(layers)
            inside |= {id(m) for m in part.modules()}
    return found


def _side_by_side(module: nn.Module, length: int) -> set[int]:
    """Return the lists that one module holds several of (attentions, norms, feed-forwards): parts, not whole layers."""
    found: set[int] = set()
    for holder in module.modules():
        if isinstance(holder, nn.ModuleList | nn.Sequential):
            continue
        lists = [m for m in holder.children() if isinstance(m, nn.ModuleList) and len(m._modules) == length >= 2]
        if len(lists) > 1:
            found |= {id(m) for m in lists}
    return found


def dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield the dropout modules with their names and rates."""
    for name, part in module.named_modules():
        rate = getattr(part, "p", None)
        if isinstance(part, nn.modules.dropout._DropoutNd) and rate is not None:
            yield name, part, float(rate)


def drop_paths(module: nn.Module) -> Iterator[tuple[str, nn.Module, float]]:
    """Yield the modules of stochastic depth, told by their names, with their rates."""
    for name, part in module.named_modules():
        label = type(part).__name__.lower()
        if any(word in label for word in ("droppath", "drop_path", "stochasticdepth")) and not list(part.children()):
            dropped, kept = _share_of(part, _DROPPED), _share_of(part, _KEPT)
            if dropped is not None:
                yield name, part, dropped
            elif kept is not None:
                yield name, part, 1 - kept


_DROPPED = ("drop_prob", "p", "drop_path", "rate", "drop_rate", "prob", "drop")
_KEPT = ("keep", "keep_prob", "keep_rate", "survival", "survival_prob", "survival_rate")
"""Names under which a module of stochastic depth holds the share that it drops, or that it keeps."""


def _share_of(part: nn.Module, names: Sequence[str]) -> float | None:
    """Return the number that a module holds under the first of some names under which it holds one."""
    values = (getattr(part, name, None) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), None)


def _is_stored_transposed(part: nn.Module, matrix: nn.Parameter) -> bool:
    """Whether a part multiplies its input with a matrix `[in, out]`, as the Conv1D of GPT-2 does; it is called."""
    if isinstance(part, nn.Linear) or matrix.shape[0] == matrix.shape[1]:
        return False
    try:
        with torch.no_grad():
            output = part(torch.zeros(1, matrix.shape[0], dtype=matrix.dtype, device=matrix.device))
    except Exception:  # of whatever type: it takes no such input
        return False
    return isinstance(output, torch.Tensor) and output.shape[-1] == matrix.shape[1]


def writers(module: nn.Module, config: DrawnConfig) -> dict[str, nn.Parameter]:
    """Return the matrices of the layers that write into the residual stream, by name.

    Told by shape and place: of each sublayer the last matrix that leads to D; of linear maps that stand in the layer
    itself those from another width, and the last of those from D to D (query, key and value stand before it).
    """
    names = {id(p): name for name, p in module.named_parameters()}
    found: list[nn.Parameter] = []
    for layer in (layer for layers in layer_lists(module, config) for layer in layers):
        square: list[nn.Parameter] = []
        for child in layer.children():
            owned = [(part, p) for part in child.modules() for p in part.parameters(recurse=False) if p.ndim == 2]
            if not owned:
                continue
            owner, matrix = owned[-1]
            leads_to, comes_from = reversed(matrix.shape) if _is_stored_transposed(owner, matrix) else matrix.shape
            if leads_to != config.d_model:
                continue
            is_square = owner is child and comes_from == config.d_model
            (square if is_square else found).append(matrix)
        found += square[-1:]
    return {names[id(p)]: p for p in found if id(p) in names}
