"""GPT-NeoX rotary on the first four channels of a head, the others pass through, base 500."""
import torch
from torch import nn
from veriformer.properties import Subject

ROT, BASE = 4, 500.0

def rotate_half(x):
    a, b = x[..., : ROT // 2], x[..., ROT // 2 :]
    return torch.cat((-b, a), dim=-1)

def apply_rotary(x, positions):
    inv = BASE ** (-torch.arange(0, ROT, 2, device=x.device).to(x.dtype) / ROT)
    emb = torch.einsum("t,f->tf", positions.to(x.dtype), inv).repeat(1, 2)
    rot, rest = x[..., :ROT], x[..., ROT:]
    return torch.cat((rot * emb.cos() + rotate_half(rot) * emb.sin(), rest), dim=-1)

common = dict(kind="rotary", build=lambda c: nn.Identity(), forward=lambda m, x, positions: apply_rotary(x, positions),
    domain={"d_model": [16, 32], "num_heads": [2]})
undeclared = Subject(**common)
declared = Subject(**common, declares={"layout": "halves", "base": 500.0, "rotary_dim": 4})
