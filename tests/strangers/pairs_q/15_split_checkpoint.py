"""A layer with one fused projection that keeps the published format of checkpoints: q, k and v each for itself."""

import torch
from einops import rearrange
from torch import nn

from veriformer.properties import Subject

WHAT = "state_dict() cuts the fused projection into three equal blocks of rows, although its rows are laid out head by head."
CAUSE = (
    "The fused weight is (heads, qkv, width) and is loaded that way, but it is saved with chunk(3): what is saved as q, k, v are rows of all "
    "three mixed, so saving and loading again gives another model. Only with one head are the two layouts the same."
)
NAMES = ("q_proj", "k_proj", "v_proj")


class FusedQKV(nn.Module):
    """Rows are (head, q/k/v, channel), so that a shard of heads is a slice."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.weight = nn.Parameter(torch.randn(3 * dim, dim) * dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(3 * dim))

    def forward(self, x):
        x = nn.functional.linear(x, self.weight, self.bias)
        return rearrange(x, "b t (h three d) -> three b h t d", h=self.heads, three=3)

    def split(self, fused):
        return rearrange(fused, "(h three d) ... -> three (h d) ...", h=self.heads, three=3)

    def merge(self, parts):
        return rearrange(torch.stack(parts), "three (h d) ... -> (h three d) ...", h=self.heads)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            for name, part in zip(NAMES, self.split(fused if keep_vars else fused.detach())):
                destination[f"{prefix}{name}.{kind}"] = part

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for kind in ("weight", "bias"):
            keys = [f"{prefix}{name}.{kind}" for name in NAMES]
            if all(key in state_dict for key in keys):
                state_dict[prefix + kind] = self.merge([state_dict.pop(key) for key in keys])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class ChunkedQKV(FusedQKV):
    def split(self, fused):
        return fused.chunk(3)


class Layer(nn.Module):
    def __init__(self, c, projection):
        super().__init__()
        self.norm_attn, self.norm_ff = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = projection(c.d_model, c.num_heads), nn.Linear(c.d_model, c.d_model)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(self.norm_attn(x))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~rearrange(mask, "b j -> b 1 1 j"), torch.finfo(sim.dtype).min)
        mixed = torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v)
        x = x + self.out(rearrange(mixed, "b h t d -> b t (h d)"))
        return x + self.ff(self.norm_ff(x))


right, wrong = (
    Subject(
        kind="layer",
        name="fused layer",
        build=lambda c, projection=projection: Layer(c, projection),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )
    for projection in (FusedQKV, ChunkedQKV)
)
