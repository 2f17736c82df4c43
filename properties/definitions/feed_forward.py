"""The matrices of a feed-forward network, found by their shapes, and the formulas that they may stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


def _relu(x: Tensor) -> Tensor:
    return x.clamp(min=0)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": _relu, "gelu": _gelu, "gelu_tanh": _gelu_tanh, "swiglu": _silu,
}  # fmt: skip
"""The formulas of Hendrycks & Gimpel 2016 and Shazeer 2020, written out; for SwiGLU, of its gate."""


@dataclass(frozen=True)
class Reading:
    """One way to read the parameters: y = down act(up x), or down (act(gate x) * up x).

    Attributes:
        up: matrices `[F, D]` with their biases `[F]`, the gate first where there are two.
        down: matrix `[D, F]` with its bias `[D]`.
    """

    up: tuple[tuple[Tensor, Tensor | float], ...]
    down: tuple[Tensor, Tensor | float]

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        """Return what the formula gives for x `[..., D]`, float64."""
        act = ACTIVATIONS[activation]
        inner = [x.double() @ w.T + b for w, b in self.up]
        hidden = act(inner[0]) * inner[1] if activation == "swiglu" else act(inner[0])
        return hidden @ self.down[0].T + self.down[1]


def _layers(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield each linear map as (name, weight `[out, in]`, bias)."""
    for name, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False, remove_duplicate=False))
        weight = own.get("weight")
        if weight is not None and weight.ndim == 2:
            transposed = type(part).__name__ == "Conv1D"
            yield name, weight.T if transposed else weight, own.get("bias")


def read(module: object, config: DrawnConfig, activation: str) -> list[Reading]:
    """Return every way to read the linear maps of a module for an activation; empty if their shapes do not fit.

    SwiGLU may have its gate first or second, or both in one map, by halves or by turns.
    """
    if not isinstance(module, nn.Module):
        return []
    ups: list[tuple[Tensor, Tensor | float]] = []
    downs: list[tuple[Tensor, Tensor | float]] = []
    for _, weight, bias in _layers(module):
        wide = weight.detach().double()
        shift: Tensor | float = 0.0 if bias is None else bias.detach().double()
        out, into = wide.shape
        if into == config.d_model and out != config.d_model:
            ups.append((wide, shift))
        elif out == config.d_model:
            downs.append((wide, shift))
    if not ups and not downs:
        return _of_matrices(module, config, activation)
    if len(downs) != 1:
        return []
    inner = downs[0][0].shape[1]
    if activation != "swiglu":
        return [Reading((up,), downs[0]) for up in ups if up[0].shape[0] == inner]
    if len(ups) == 1 and ups[0][0].shape[0] == 2 * inner:
        w, b = ups[0]
        layouts = ((slice(0, inner), slice(inner, None)), (slice(0, None, 2), slice(1, None, 2)))
        parts = [[(w[rows], b if isinstance(b, float) else b[rows]) for rows in layout] for layout in layouts]
        return [Reading(pair, downs[0]) for part in parts for pair in permutations(part, 2)]
    return [Reading(pair, downs[0]) for pair in permutations(ups, 2) if all(u[0].shape[0] == inner for u in pair)]


def _of_matrices(module: nn.Module, config: DrawnConfig, activation: str) -> list[Reading]:
    """Return every way to read bare parameters: the matrices of two maps, either way round, and a bias of each width.

    `x @ W` and `W x` take matrices of transposed shapes: both ways are tried, with the gate first or second.
    """
    named = {id(p): p for p in module.parameters()}.values()
    matrices = [p.detach().double() for p in named if p.ndim == 2 and config.d_model in p.shape]
    vectors = [p.detach().double().flatten() for p in named if p.ndim == 1]
    if (
        not _holds_matrices(module)
        or len(matrices) != (3 if activation == "swiglu" else 2)
        or sum(p.ndim > 1 for p in named) != len(matrices)
    ):
        return []
    found = []
    for turned in (False, True):
        maps = [w.T if turned else w for w in matrices]
        downs = [w for w in maps if w.shape[0] == config.d_model != w.shape[1]]
        ups = [w for w in maps if w.shape[1] == config.d_model != w.shape[0]]
        if len(downs) != 1 or any(w.shape[0] != downs[0].shape[1] for w in ups):
            continue
        inner = [b for b in vectors if len(b) == downs[0].shape[1]]
        outer = [b for b in vectors if len(b) == config.d_model]
        if len(outer) > 1 or len(inner) not in (0, len(ups)):
            continue
        below = (downs[0], outer[0] if outer else 0.0)
        shifts: list[tuple[Tensor | float, ...]] = list(permutations(inner)) if inner else [(0.0,) * len(ups)]
        pairs = product(permutations(ups), shifts)
        found += [Reading(tuple(zip(order, biases, strict=True)), below) for order, biases in pairs]
    return found


def nearest_reading(module: object, config: DrawnConfig, x: Tensor, activation: str, got: Tensor) -> Tensor:
    """Return, of all ways to read the linear maps, the output for `x` that comes nearest to the one that was got."""
    outputs = [reading(x, activation) for reading in read(module, config, activation)]
    return min(outputs, key=lambda output: float((output - got).abs().nan_to_num(nan=torch.inf).max()))


def can_be_read(module: object, config: DrawnConfig, activation: str) -> Tensor:
    """Return whether there is a way to read the linear maps of a module for an activation."""
    return torch.tensor(bool(read(module, config, activation)))


def needs_readable_maps(subject: Subject) -> str | None:
    """Apply only where the linear maps can be found by their shapes."""
    config = subject.config or DrawnConfig()
    try:
        module = subject.module if subject.module is not None else subject.build(config) if subject.build else None
    except Exception:
        return None  # whatever it is, the preflight says it better
    fits = isinstance(module, nn.Module) and (sum(1 for _ in _layers(module)) >= 2 or _holds_matrices(module))
    return None if fits else "its linear maps cannot be told from its parameters"


def _holds_matrices(module: nn.Module) -> bool:
    """Whether its maps may be bare parameters: no module has a weight, and no matrix is made of what it holds."""
    names = [name.rpartition(".")[2] for name, p in module.named_parameters() if p.ndim == 2]
    is_made = any("parametrizations" in name for name, _ in module.named_parameters())
    normed = any(name.endswith(("_g", "_v", "_orig")) for name in names)
    return len(names) in (2, 3) and not is_made and not normed and not any(True for _ in _layers(module))
