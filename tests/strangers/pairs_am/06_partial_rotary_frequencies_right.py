import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class PartialRotaryEmbedding(nn.Module):
    """GPT-NeoX: the first rotary_dim channels of a head are rotated, the rest pass through."""

    def __init__(self, head_dim, rotary_dim, base=10000.0):
        super().__init__()
        self.head_dim, self.rotary_dim, self.base = head_dim, rotary_dim, base

    def inv_freq(self, device):
        head_dim, rotary_dim = self.head_dim, self.rotary_dim
        return 1.0 / self.base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)

    def forward(self, x, positions):
        with torch.autocast(x.device.type, enabled=False):
            angles = torch.outer(positions.double(), self.inv_freq(x.device))
            emb = torch.cat((angles, angles), dim=-1)
            cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        rot, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        return torch.cat((rot * cos + rotate_half(rot) * sin, rest), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    module=PartialRotaryEmbedding(16, 8),
    config=DrawnConfig(d_model=32, num_heads=2),
    forward=lambda m, x, positions: m(x, positions),
    declares={"layout": "halves", "rotary_dim": 8, "base": 10000.0},
)
