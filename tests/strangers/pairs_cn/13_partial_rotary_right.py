"""Rotary embedding of the first channels of a head alone (GPT-NeoX's rotary_pct), as a drop-in."""
import torch
from torch import nn
from veriformer.properties import Subject

ROTARY = 4


class PartialRotary(nn.Module):
    def __init__(self, rotary_ndims=ROTARY, base=10000):
        super().__init__()
        self.ndims, self.base = rotary_ndims, base

    def frequencies(self, head_size, device):
        channels = torch.arange(0, self.ndims, 2, dtype=torch.float64, device=device)
        return 1.0 / self.base ** (channels / self.ndims)

    @staticmethod
    def rotate_half(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    def forward(self, x, positions):
        head_size = x.shape[-1]
        if head_size < self.ndims:
            raise ValueError(f"a head of {head_size} channels has no {self.ndims} to rotate")
        turned, kept = x[..., : self.ndims], x[..., self.ndims :]
        freqs = torch.outer(positions.to(torch.float64), self.frequencies(head_size, x.device))
        emb = torch.cat((freqs, freqs), dim=-1)
        turned = turned * emb.cos().to(x.dtype) + self.rotate_half(turned) * emb.sin().to(x.dtype)
        return torch.cat((turned, kept), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: PartialRotary(),
    forward=lambda m, x, positions: m(x, positions),
    declares={"rotary_dim": ROTARY, "layout": "halves", "base": 10000},
)
