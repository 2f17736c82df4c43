WHAT = "frequencies of a partial rotary embedding are spread over the whole head (exponent 2i / head_size) rather than over the channels that are rotated (2i / rotary_ndims): line 19."
"""Partial rotary embedding of GPT-NeoX: the first quarter or half of a head is rotated (rotary_pct)."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class GPTNeoXRotaryEmbedding(nn.Module):
    def __init__(self, head_size, rotary_pct=0.5, base=10000):
        super().__init__()
        self.head_size = head_size
        self.rotary_ndims = int(head_size * rotary_pct)
        self.base = float(base)

    def inv_freq(self, device):
        exponents = torch.arange(0, self.rotary_ndims, 2, dtype=torch.float64, device=device)
        return self.base ** -(exponents / self.head_size)

    @staticmethod
    def rotate_half(x):
        x1 = x[..., : x.shape[-1] // 2]
        x2 = x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    def forward(self, x, positions):
        x_rot, x_pass = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        freqs = torch.outer(positions.to(torch.float64), self.inv_freq(x.device))
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        return torch.cat((x_rot * cos + self.rotate_half(x_rot) * sin, x_pass), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary of GPT-NeoX",
    module=GPTNeoXRotaryEmbedding(16),
    config=DrawnConfig(d_model=32, num_heads=2, num_key_value_heads=2),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "halves", "rotary_dim": 8, "base": 10000},
)
