"""Partial rotary embedding, GPT-J order: the first ROT channels of a head turn in neighbouring pairs, the others pass."""
import torch

from veriformer.properties import Subject

ROT = 4
BASE = 10000.0


def sinusoids(positions, width):
    rate = BASE ** (-torch.arange(0, ROT, 2, dtype=torch.float64, device=positions.device) / ROT)
    angle = positions.double()[:, None] * rate
    return angle.sin(), angle.cos()


def rotate(x, positions):
    width = x.shape[-1]
    if width < ROT:
        raise ValueError(f"heads need at least {ROT} channels")
    sin, cos = (part.to(x.dtype) for part in sinusoids(positions, width))
    turned, passed = x[..., :ROT], x[..., ROT:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((turned, passed), dim=-1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    build=lambda c: torch.nn.Identity(),
    forward=lambda m, x, positions: rotate(x, positions),
    declares={"positions": "rotary", "rotary_dim": ROT, "layout": "interleaved", "base": BASE},
)
