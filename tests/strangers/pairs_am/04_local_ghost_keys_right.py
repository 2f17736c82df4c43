import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class LocalSelfAttention(nn.Module):
    """Causal attention to the last `window` tokens, in O(T * window) by unfolding keys and values."""

    def __init__(self, dim, heads, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        w = self.window
        q, k, v = self.to_qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k = F.pad(k, (0, 0, w - 1, 0)).unfold(2, w, 1)  # B H T K w
        v = F.pad(v, (0, 0, w - 1, 0)).unfold(2, w, 1)
        sim = torch.einsum("bhtk,bhtkw->bhtw", q, k) * q.shape[-1] ** -0.5

        keep = torch.ones(B, T, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask
        keep = torch.cat([keep.new_zeros(B, w - 1), keep], dim=1).unfold(1, w, 1)
        sim = sim.masked_fill(~keep[:, None], torch.finfo(sim.dtype).min)

        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhtw,bhtkw->bhtk", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="local self-attention",
    build=lambda c: LocalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": 3},
)
