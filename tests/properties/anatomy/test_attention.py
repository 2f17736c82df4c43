"""Attentions found by their weights: scale, bias, mask and sources are those that were put in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.anatomy.attention import Attention, attentions, followed, is_part_of_rows, past
from veriformer.properties.anatomy.traced import traced

B, T, H, K = 5, 7, 3, 4
Form = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Written(nn.Module):
    """Attention of projected queries, keys and values, as `form(q, k, v, allowed)` of `[B, H, T, K]` writes it."""

    def __init__(self, form: Form, groups: int = H) -> None:
        super().__init__()
        self.form = form
        self.q = nn.Linear(8, H * K)
        self.k, self.v = nn.Linear(8, groups * K), nn.Linear(8, groups * K)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, K)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.form(q, k, v, torch.ones(T, T, dtype=torch.bool).tril())


def found(form: Form, **given: Any) -> Attention:
    """Return the one attention that is found in a model."""
    torch.manual_seed(0)
    model = Written(form, **given).double()
    x = torch.randn(B, T, 8, dtype=torch.float64)
    (one,) = attentions(traced(model, lambda: model(x), B, 1e-6))
    assert one.is_followed(1e-6)
    return one


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def by_hand(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    e = torch.where(allowed, (q * 0.1 @ (3 * k).mT).exp(), 0.0)
    return e / e.sum(-1, keepdim=True) @ v


def keys_first(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = torch.einsum("bhsk,bhtk->bhst", k, q).masked_fill(~allowed.T, -1e9) * 0.3
    return torch.einsum("bhst,bhse->bthe", scores.softmax(-2), v)


def heads_first(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.zeros((), dtype=q.dtype), q, k.mT, alpha=0.3)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("form", [plain, fused, by_hand, keys_first, heads_first])
def test_scale_mask_and_sources_are_found_in_every_form(form: Form) -> None:
    one = found(form)
    assert one.over == "keys"
    assert one.weights.shape == (B, H, T, T)
    assert one.scale == pytest.approx([0.3] * H)
    assert torch.equal(one.hidden, torch.ones(T, T, dtype=torch.bool).triu(1).expand(H, T, T))
    assert float(one.bias.abs().max()) < 1e-9
    assert [s.start for s in one.query_from if s] == [0, K, 2 * K]
    assert {s.place for s in one.value_from if s} == {"v"}


def test_a_bias_is_read_off_up_to_a_constant_a_row() -> None:
    torch.manual_seed(1)
    bias = torch.randn(H, T, T, dtype=torch.float64)
    one = found(lambda q, k, v, a: (q @ k.mT + bias).softmax(-1) @ v)
    assert torch.allclose(one.bias, bias - bias.mean(-1, keepdim=True), atol=1e-9)


def test_a_head_of_another_scale_is_told_from_the_others() -> None:
    scales = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64)[:, None, None]
    assert found(lambda q, k, v, a: (q @ k.mT * scales).softmax(-1) @ v).scale == pytest.approx([0.5, 0.25, 0.5])


def test_a_softmax_over_queries_is_told() -> None:
    one = found(lambda q, k, v, a: (q @ k.mT).softmax(-2) @ v)
    assert one.over == "queries"
    assert torch.allclose(one.weights.sum(-2), torch.ones(1, dtype=torch.float64))


def test_weights_times_a_number_are_weights() -> None:
    sums = found(lambda q, k, v, a: 1.1 * (q @ k.mT).softmax(-1) @ v).weights.sum(-1)
    assert torch.allclose(sums, torch.full_like(sums, 1.1))


def test_groups_have_one_source_each() -> None:
    def grouped(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        k, v = (x.expand(-1, H, -1, -1) for x in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    one = found(grouped, groups=1)
    assert {s.start for s in one.key_from if s} == {0}
    assert {s.start for s in one.query_from if s} == {0, K, 2 * K}


@pytest.mark.parametrize(
    "form",
    [
        lambda q, k, v, a: torch.relu(q @ k.mT) @ v,
        lambda q, k, v, a: (5 * torch.tanh(q @ k.mT / 5)).softmax(-1) @ v,
        lambda q, k, v, a: (q.softmax(-1) @ k.softmax(-2).mT) @ v,
    ],
)
def test_what_is_no_softmax_of_its_scores_is_not_followed(form: Form) -> None:
    torch.manual_seed(0)
    model = Written(form).double()
    x = torch.randn(B, T, 8, dtype=torch.float64)
    assert not followed(traced(model, lambda: model(x), B, 1e-6))


def test_the_past_of_a_bias_has_mean_zero_in_each_row() -> None:
    bias = torch.arange(9.0).reshape(1, 3, 3)
    kept = past(bias, torch.ones(1, 3, 3, dtype=torch.bool))
    assert kept.tolist() == [[[0, 0, 0], [-0.5, 0.5, 0], [-1, 0, 1]]]


def test_a_key_of_next_to_no_weight_is_not_hidden() -> None:
    def unloved(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        score = torch.where(torch.arange(T) == 3, -100.0, 0.0).to(k).expand(B, H, T)[..., None]
        scores = torch.cat([q, torch.ones_like(q[..., :1])], -1) @ torch.cat([k, score], -1).mT
        return scores.masked_fill(torch.arange(T) == 5, -torch.inf).softmax(-1) @ v

    one = found(unloved)
    assert float(one.weights[..., 3].max()) < 1e-30
    assert one.hidden.any(1).tolist() == [[key == 5 for key in range(T)]] * H


def test_two_products_share_one_softmax() -> None:
    def split(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
        near, far = k.split([4, 3], 2)
        weights = torch.cat([q @ near.mT, q @ far.mT], -1).softmax(-1)
        return weights[..., :4] @ v[:, :, :4] + weights[..., 4:] @ v[:, :, 4:]

    torch.manual_seed(0)
    model = Written(split).double()
    x = torch.randn(B, T, 8, dtype=torch.float64)
    seen = traced(model, lambda: model(x), B, 1e-6)
    near, far = followed(seen)
    assert is_part_of_rows(seen, near)
    assert is_part_of_rows(seen, far)
    whole = Written(plain).double()
    seen = traced(whole, lambda: whole(x), B, 1e-6)
    assert not is_part_of_rows(seen, followed(seen)[0])
