"""An encoder layer that runs unpadded: real tokens of all samples in one row, told apart by cumulative lengths."""
import torch
from torch import nn

from veriformer.properties import Subject


class UnpaddedLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads, self.d = heads, width // heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.Wqkv, self.Wo = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def attend(self, packed, cu_seqlens):
        N = packed.shape[0]
        index = torch.arange(N, device=packed.device)
        segment = torch.searchsorted(cu_seqlens[1:], index, right=True)
        same = segment[:, None] == segment[None]
        q, k, v = self.Wqkv(packed).view(N, 3, self.heads, self.d).permute(1, 2, 0, 3)
        scores = (q @ k.transpose(-1, -2) * self.d**-0.5).masked_fill(~same, -torch.inf)
        return self.Wo((scores.softmax(-1) @ v).transpose(0, 1).reshape(N, self.heads * self.d))

    def forward(self, x, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        cu_seqlens = nn.functional.pad(attention_mask.sum(1).cumsum(0), (1, 0))
        packed = x[attention_mask]
        packed = packed + self.attend(self.attn_norm(packed), cu_seqlens)
        packed = packed + self.mlp(self.mlp_norm(packed))
        return x.masked_scatter(attention_mask[..., None], packed.to(x.dtype))


subject = Subject(
    kind="layer",
    name="unpadded encoder layer",
    build=lambda c: UnpaddedLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm_placement": "pre", "activation": "gelu", "structure": "other"},
)
