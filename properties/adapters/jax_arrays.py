"""A JAX function as a torch module: its parameters are torch parameters, arrays cross by DLPack, gradients by `jax.vjp`.

So everything that holds for a torch module is asked of a JAX one: gradients, dtypes, copies, state dicts, parameter counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class JaxModule(nn.Module):
    """`apply(params, *inputs)` of a JAX library, called with torch tensors.

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

        leaves, self.structure = jax.tree_util.tree_flatten(params)
        self.leaves = nn.ParameterList([nn.Parameter(_to_torch(leaf).clone()) for leaf in leaves])
        self.apply_in_jax = apply

    def forward(self, *inputs: Tensor) -> Tensor:
        """Call the function; gradients flow to the parameters and to floating point inputs."""
        found: Tensor = _Through.apply(self.apply_in_jax, self.structure, len(self.leaves), *self.leaves, *inputs)
        return found


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, apply: Callable[..., Any], structure: Any, count: int, *tensors: Tensor) -> Tensor:
        import jax

        floating = [i for i, t in enumerate(tensors) if t.is_floating_point()]
        with jax.enable_x64(any(t.dtype == torch.float64 for t in tensors)):
            arrays = [_to_jax(t) for t in tensors]

            def call(*varied: Any) -> Any:
                given = list(arrays)
                for index, value in zip(floating, varied, strict=True):
                    given[index] = value
                return apply(jax.tree_util.tree_unflatten(structure, given[:count]), *given[count:])

            if any(t.requires_grad for t in tensors):
                output, ctx.pull_back = jax.vjp(call, *[arrays[i] for i in floating])
            else:
                output = call(*[arrays[i] for i in floating])
            ctx.floating, ctx.number, ctx.wide = floating, len(tensors), output.dtype == "float64"
            return _to_torch(output).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        import jax

        with jax.enable_x64(ctx.wide):
            found = ctx.pull_back(_to_jax(gradients[0]))
            given: list[Any] = [None] * ctx.number
            for index, value in zip(ctx.floating, found, strict=True):
                given[index] = _to_torch(value).clone()
        return None, None, None, *given


def _to_jax(tensor: Tensor) -> Any:
    import jax

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.int64 and not jax.config.jax_enable_x64:
        tensor = tensor.int()
    return jax.dlpack.from_dlpack(tensor.clone())


def _to_torch(array: Any) -> Tensor:
    return torch.from_dlpack(array)
