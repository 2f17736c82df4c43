"""Self-attention with one fused projection and grouped queries; keys and values are not repeated."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class GroupedAttention(nn.Module):
    """Query head h reads the key-value head h // (heads / groups)."""

    def __init__(self, d_model, heads, groups):
        super().__init__()
        if heads % groups:
            raise ValueError("the key-value heads must divide the query heads")
        self.heads, self.groups, self.share = heads, groups, heads // groups
        self.width = d_model // heads
        self.sizes = [heads * self.width, groups * self.width, groups * self.width]
        self.qkv = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def mix(self, x, attention_mask=None):
        """The weights [B, G, R, T, S] and the values [B, S, G, K]."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).split(self.sizes, dim=-1)
        q = q.view(batch, length, self.groups, self.share, self.width)
        k = k.view(batch, length, self.groups, self.width)
        v = v.view(batch, length, self.groups, self.width)
        scores = torch.einsum("btgrk,bsgk->bgrts", q, k) / math.sqrt(self.width)
        if attention_mask is not None:
            itself = torch.eye(length, dtype=torch.bool, device=x.device)
            allowed = attention_mask[:, None, None, None, :] | itself
            scores = scores.masked_fill(~allowed, -torch.inf)
        return scores.softmax(dim=-1), v

    def forward(self, x, attention_mask=None):
        weights, v = self.mix(x, attention_mask)
        y = torch.einsum("bgrts,bsgk->btgrk", weights, v)
        return self.out(y.flatten(2))


def projections(model):
    q, k, v = model.qkv.weight.split(model.sizes, dim=0)
    return {"q": q, "k": k, "v": v, "o": model.out.weight}


subject = Subject(
    kind="self_attention",
    name="grouped attention",
    build=lambda c: GroupedAttention(c.d_model, c.num_heads, c.num_key_value_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    weights=lambda model, x, attention_mask=None: model.mix(x, attention_mask)[0].flatten(1, 2),
    projections=projections,
    declares={"causal": False, "positions": "none", "bias": False, "grouped_queries": True},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(1, 4, 8)).shape)
