"""A JAX function as a torch module: parameters of torch, arrays that cross by DLPack, gradients by `jax.vjp`.

So everything that is asked of a torch module is asked of a JAX one: gradients, dtypes, copies, state dicts, counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
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
            self.is_narrow = _narrows(self.function, [*self.leaves, *inputs])
        found: Tensor = _Through.apply(self.function, *self.leaves, *inputs)
        return found

    def beside(self, apply: Callable[..., Any]) -> Callable[..., Tensor]:
        """Return another function of the same parameters, as a cache is filled by another call than training."""
        return _Beside(self.leaves, _Function(apply, self.function.structure))


@dataclass(frozen=True, eq=False)
class _Beside:
    """A function of the parameters of a module, copied with it."""

    leaves: nn.ParameterList
    function: _Function

    def __call__(self, *inputs: Tensor) -> Tensor:
        found: Tensor = _Through.apply(self.function, *self.leaves, *inputs)
        return found


def jitted(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `jax.jit(function)` that compiles quickly and optimises little.

    XLA compiles anew for every shape. A check asks a tiny model at a hundred shapes, a few times each: there a compiler
    that optimises takes nearly all of the time, five times as much as one that does not.

    Args:
        function: of arrays.
        options: of `jax.jit`.
    """
    import jax

    return jax.jit(function, compiler_options=_little_optimisation(), **options)


@functools.cache
def _little_optimisation() -> dict[str, Any] | None:
    """Return options of XLA's compiler for the CPU; None for other devices and for an XLA that does not know them."""
    import jax

    options = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda x: x, compiler_options=options)(0.0)
    except Exception:  # XLA names its options anew from time to time, and raises its own errors
        return None
    return options


@dataclass(frozen=True, eq=False)
class _Function:
    """What a module computes; copies of the module share it, since it holds no state but what was compiled."""

    apply: Callable[..., Any]
    structure: Any

    def __deepcopy__(self, memo: Any) -> _Function:
        return self

    def run(self, *arrays: Any) -> Any:
        """Call the function on the leaves of its parameters, then the inputs."""
        import jax

        count = self.structure.num_leaves
        return self.apply(jax.tree_util.tree_unflatten(self.structure, arrays[:count]), *arrays[count:])

    def pull_back(self, gradient: Any, *arrays: Any) -> list[Any]:
        """Return the gradients of the floating point arrays; the forward is computed again."""
        import jax
        import jax.numpy as jnp

        floating = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]

        def call(*varied: Any) -> Any:
            given = list(arrays)
            for index, value in zip(floating, varied, strict=True):
                given[index] = value
            return self.run(*given)

        _, pull = jax.vjp(call, *(arrays[i] for i in floating))
        found = dict(zip(floating, pull(gradient), strict=True))
        return [found.get(i) for i in range(len(arrays))]

    @functools.cached_property
    def compiled(self) -> Callable[..., Any]:
        """`run`, compiled for each form of its arrays; the same for calls with gradients as without."""
        return jitted(self.run)

    @functools.cached_property
    def compiled_pull_back(self) -> Callable[..., Any]:
        """`pull_back`, compiled when gradients are really asked for: that costs three times a forward."""
        return jitted(self.pull_back)


def _narrows(function: _Function, tensors: list[Tensor]) -> bool:
    """Whether float64 inputs pass through float32 on the way, as in a softmax that is always computed so."""
    import jax

    with jax.enable_x64(True):
        return "f32[" in str(jax.make_jaxpr(function.run)(*[_to_jax(t) for t in tensors]))


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: _Function, *tensors: Tensor) -> Tensor:
        import jax

        ctx.function = function
        ctx.save_for_backward(*tensors)
        with jax.enable_x64(_is_wide(tensors)):
            return _to_torch(function.compiled(*[_to_jax(t) for t in tensors])).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        import jax

        tensors = ctx.saved_tensors
        with jax.enable_x64(_is_wide(tensors)):
            found = ctx.function.compiled_pull_back(_to_jax(gradients[0]), *[_to_jax(t) for t in tensors])
            return None, *(None if value is None else _to_torch(value).clone() for value in found)


def _is_wide(tensors: Iterable[Tensor]) -> bool:
    return any(t.dtype == torch.float64 for t in tensors)


def _to_jax(tensor: Tensor) -> Any:
    import jax

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.int64 and not jax.config.jax_enable_x64:
        tensor = tensor.int()
    return jax.dlpack.from_dlpack(tensor.clone())


def _to_torch(array: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(array)
