"""JAX functions as torch modules: values and gradients are those of the function, on every path."""

from __future__ import annotations

import copy

import pytest
import torch

from veriformer.properties.adapters.shared import jax_arrays
from veriformer.properties.adapters.shared.jax_arrays import JaxModule

jax = pytest.importorskip("jax")


def scaled(factor: float) -> JaxModule:
    """Return x @ w * factor; the factor is captured, no parameter."""
    captured = jax.numpy.full(3, factor)
    start = {"w": jax.numpy.arange(6.0).reshape(2, 3), "unused": jax.numpy.ones(1)}
    return JaxModule(start, lambda params, x, rows: (x @ params["w"] * captured)[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_and_gradients_are_those_of_the_function(dtype: torch.dtype) -> None:
    module, rows = scaled(2.0).to(dtype), torch.tensor([1, 1, 0])
    x = torch.tensor([[1.0, -1.0], [0.5, 3.0]], dtype=dtype, requires_grad=True)
    weight = torch.arange(6.0, dtype=dtype).reshape(2, 3).requires_grad_()
    got, wanted = module(x, rows), (x @ weight * 2)[rows]
    assert torch.equal(got, wanted)
    with torch.no_grad():
        assert torch.equal(module(x, rows), wanted)
    pulled = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0], [5.0, 0.0, 1.0]], dtype=dtype)
    unused, own = module.leaves
    assert own.shape == weight.shape
    found = torch.autograd.grad(got, [x, own, unused], pulled)
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(wanted, [x, weight], pulled), strict=False))
    assert torch.equal(found[2], torch.zeros_like(unused))


def test_what_is_compiled_belongs_to_one_function_and_its_copies() -> None:
    one, other, x, rows = scaled(2.0), scaled(5.0), torch.ones(2, 2), torch.arange(2)
    first = one(x, rows)
    assert torch.equal(other(x, rows), 2.5 * first)
    twin = copy.deepcopy(one)
    with torch.no_grad():
        twin.leaves[1].mul_(10)
    assert torch.equal(twin(x, rows), 10 * first)
    assert torch.equal(one(x, rows), first)


def test_a_compiler_that_does_not_know_the_options_is_asked_without(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = jax.jit

    def other_release(function: object, compiler_options: object = None, **options: object) -> object:
        assert compiler_options is None or set(compiler_options) == {"xla_backend_optimization_level"}, "No such option"
        return jit(function, **options)

    monkeypatch.setattr(jax, "jit", other_release)
    jax_arrays._little_optimisation.cache_clear()
    try:
        assert scaled(2.0)(torch.ones(2, 2), torch.arange(1)).tolist() == [[6.0, 10.0, 14.0]]
        assert jax_arrays._little_optimisation() is None
    finally:
        jax_arrays._little_optimisation.cache_clear()
