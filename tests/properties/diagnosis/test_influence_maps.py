"""What the shape of a leak says: a diagonal that is off concerns every row, and nothing else is called so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from veriformer.properties import Subject, check
from veriformer.properties.causes.influence_maps import causal_region, leak_cause

T = 6
EVERY = [(t, s) for t in range(T) for s in range(t + 1, T)]
SHAPES = {
    "exactly one step ahead": [(t, s) for t, s in EVERY if s == t + 1],
    "off by one in each of them": [(t, s) for t, s in EVERY if s <= t + 2],
    "the first 3 positions see one another both ways": [(0, 1), (0, 2), (1, 2)],
    "only output 0 sees the future": [(0, 1)],
    "only input 3 leaks": [(0, 3), (2, 3)],
    "influence from 3 of 15 forbidden positions": [(0, 1), (2, 3), (4, 5)],
    "the causal mask is not applied": EVERY,
}


@pytest.mark.parametrize("words", SHAPES)
def test_a_leak_is_named_by_all_of_its_shape(words: str) -> None:
    allowed = causal_region(T)
    seen = allowed.double()
    for place in SHAPES[words]:
        seen[place] = 1
    assert words in (leak_cause(seen, allowed, num_layers=2) or "")


class Blocked(nn.Module):
    """Self-attention whose first three positions see one another both ways."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden[:3, :3] = False
        out: Tensor = self.attention(x, x, x, attn_mask=hidden, need_weights=False)[0]
        return out


def test_what_is_declared_causal_has_no_prefix_unless_it_declares_one() -> None:
    outcomes = {}
    for name, declared in {"asked": {}, "judged": {"causal": True}, "meant": {"causal": True, "prefix": 3}}.items():
        mine = Subject(
            kind="self_attention", build=lambda c: Blocked(c.d_model, c.num_heads), forward=lambda m, x: m(x),
            declares=declared,
        )  # fmt: skip
        (result,) = check(mine, only=["causality.no-future-influence"], profile="quick").results
        outcomes[name] = result.outcome
    assert outcomes == {"asked": "OPEN", "judged": "FAIL", "meant": "PASS"}
