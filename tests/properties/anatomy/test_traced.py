"""The trace of a forward: products, values and modules, however they are written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.anatomy.traced import Traced, traced


def of(function: object, module: nn.Module | None = None, batch: int = 5) -> Traced:
    return traced(module or nn.Identity(), function, batch, 1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "product",
    [
        lambda a, b: a @ b,
        lambda a, b: torch.einsum("bij,bjk->bik", a, b),
        torch.bmm,
        lambda a, b: torch.baddbmm(torch.ones(()).to(a), a, b),
    ],
)
def test_a_product_is_seen_however_it_is_written(product: object) -> None:
    a, b = torch.randn(5, 3, 4), torch.randn(5, 4, 2)
    (seen,) = of(lambda: product(a, b)).products  # type: ignore[operator]
    assert torch.equal(seen.left, a)
    assert torch.equal(seen.right, b)


def test_fused_attention_comes_down_to_its_two_products() -> None:
    q, k, v = (torch.randn(5, 2, 7, 4) for _ in range(3))
    scores, output = of(lambda: functional.scaled_dot_product_attention(q, k, v)).products
    assert torch.allclose(scores.output.reshape(5, 2, 7, 7), q @ k.mT * 0.5, atol=1e-5)
    assert output.output.shape[-2:] == (7, 4)


def test_a_fused_layer_is_taken_apart_and_the_switch_is_left_as_it_was() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    seen = of(lambda: layer(torch.randn(5, 7, 8)), layer)
    assert len(seen.products) >= 6
    assert torch.backends.mha.get_fastpath_enabled()


def test_modules_are_named_and_hooks_removed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)))
    x = torch.randn(5, 7, 4)
    seen = of(lambda: model(x), model)
    assert [call.place for call in seen.calls] == ["0", "1.0", "1", ""]
    assert seen.products[0].place == "0"
    assert torch.equal(seen.calls[1].given, model[0](x))
    assert seen.output is not None
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_parameters_are_not_copied_and_what_is_changed_in_place_is() -> None:
    model = nn.Linear(4, 4, bias=False)

    def run() -> Tensor:
        x = torch.ones(5, 4)
        y: Tensor = model(x)
        x.zero_()
        return y.add_(1)

    seen = of(run, model)
    (product,) = seen.products
    assert product.right.data_ptr() == model.weight.data_ptr()
    assert bool((product.left == 1).all())
    assert torch.allclose(product.output, torch.ones(5, 4) @ model.weight.T)


def test_what_is_made_of_a_trace_is_made_once() -> None:
    seen, calls = of(lambda: torch.ones(2, 2)), []
    assert seen.once("key", lambda: calls.append(1)) is None
    seen.once("key", lambda: calls.append(2))
    assert calls == [1]
