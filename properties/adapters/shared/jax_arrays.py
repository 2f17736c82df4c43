"""A JAX function as a torch module: parameters of torch, arrays that cross by DLPack, gradients by `jax.vjp`.

So everything that is asked of a torch module is asked of a JAX one: gradients, dtypes, copies, state dicts, counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor, nn


class JaxModule(nn.Module):
    """`apply(params, *inputs)` of a JAX library, called with torch tensors.

    `is_narrow` tells, once it was called with float64, whether it passes through float32: torch does not see that.

    Args:
        params: pytree of arrays.
        apply: a pure function of params and arrays; gives one array.

    >>> import jax.numpy as jnp
    >>> double = JaxModule({"w": jnp.ones(2)}, lambda params, x: 2 * params["w"] * x)
    >>> double(torch.tensor([1.0, 3.0])).tolist()
    [2.0, 6.0]
    """

    def __init__(self, params: Any, apply: Callable[..., Any]) -> None:
        super().__init__()
        import jax

        leaves, structure = jax.tree_util.tree_flatten(params)
        self.leaves = nn.ParameterList([nn.Parameter(_to_torch(leaf).clone()) for leaf in leaves])
        self.function = _Function(apply, structure)
        self.is_narrow: bool | None = None

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function; gradients flow to the parameters and to floating point inputs."""
        if self.is_narrow is None and any(p.dtype == torch.float64 for p in self.leaves):
            self.is_narrow = _narrows(self.function, [*self.leaves, *inputs], len(self.leaves))
        found: Tensor = _Through.apply(self.function, len(self.leaves), *self.leaves, *inputs)
        return found


@dataclass(frozen=True, eq=False)
class _Function:
    """What a module computes; copies of the module share it, since it holds no state."""

    apply: Callable[..., Any]
    structure: Any

    def __deepcopy__(self, memo: Any) -> _Function:
        return self


def _narrows(function: _Function, tensors: list[Tensor], count: int) -> bool:
    """Whether float64 inputs pass through float32 on the way, as in a softmax that is always computed so."""
    import jax

    def run(*arrays: Any) -> Any:
        return function.apply(jax.tree_util.tree_unflatten(function.structure, arrays[:count]), *arrays[count:])

    with jax.enable_x64(True):
        return "f32[" in str(jax.make_jaxpr(run)(*[_to_jax(t) for t in tensors]))


@functools.cache
def _compiled(function: _Function, count: int, floating: tuple[int, ...], pulls: bool) -> Any:
    """Return a jitted function of all arrays: the output, and what pulls gradients back if asked for."""
    import jax

    def run(*arrays: Any) -> Any:
        def call(*varied: Any) -> Any:
            given = list(arrays)
            for index, value in zip(floating, varied, strict=True):
                given[index] = value
            return function.apply(jax.tree_util.tree_unflatten(function.structure, given[:count]), *given[count:])

        varied = [arrays[i] for i in floating]
        return jax.vjp(call, *varied) if pulls else (call(*varied), None)

    return jax.jit(run)


@functools.cache
def _pulling_back() -> Any:
    import jax

    return jax.jit(lambda pull_back, gradient: pull_back(gradient))


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: _Function, count: int, *tensors: Tensor) -> Tensor:
        import jax

        floating = tuple(i for i, t in enumerate(tensors) if t.is_floating_point())
        wide = any(t.dtype == torch.float64 for t in tensors)
        pulls = any(t.requires_grad for t in tensors)
        with jax.enable_x64(wide):
            run = _compiled(function, count, floating, pulls)
            output, ctx.pull_back = run(*[_to_jax(t) for t in tensors])
            ctx.floating, ctx.number, ctx.wide = floating, len(tensors), wide
            return _to_torch(output).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        import jax

        with jax.enable_x64(ctx.wide):
            found = _pulling_back()(ctx.pull_back, _to_jax(gradients[0]))
            given: list[Any] = [None] * ctx.number
            for index, value in zip(ctx.floating, found, strict=True):
                given[index] = _to_torch(value).clone()
        return None, None, *given


def _to_jax(tensor: Tensor) -> Any:
    import jax

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.int64 and not jax.config.jax_enable_x64:
        tensor = tensor.int()
    return jax.dlpack.from_dlpack(tensor.clone())


def _to_torch(array: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(array)
