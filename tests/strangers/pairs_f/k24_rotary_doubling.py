"""Rotary embedding without a table: a position is 32 * block + rest. The rest is rotated directly; the block by binary powers, whose
cosines and sines come from the double-angle formulas (one pair of registers, as in the kernel)."""
import torch
from torch import Tensor
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "In the doubling step cos is overwritten by cos(2a) before sin(2a) = 2 sin(a) cos(a) is formed from it, so every position from "
    "64 on (binary powers of the block after the first) is rotated by a wrong and no longer unit factor."
)
PLACE = "double_angle_in_place: sin is computed from the new cos"

BLOCK = 32


def double_angle(cos: Tensor, sin: Tensor):
    return cos * cos - sin * sin, 2 * sin * cos


def double_angle_in_place(cos: Tensor, sin: Tensor):
    cos = cos * cos - sin * sin
    sin = 2 * sin * cos
    return cos, sin


def block_rotation(block: Tensor, angle: Tensor, double) -> tuple[Tensor, Tensor]:
    """cos and sin of block[:, None] * angle for integers >= 0 by square and multiply."""
    out_cos = torch.ones(block.shape[0], angle.shape[0], dtype=angle.dtype, device=angle.device)
    out_sin = torch.zeros_like(out_cos)
    cos, sin = angle.cos(), angle.sin()
    bits = int(block.max()).bit_length() if block.numel() else 0
    for bit in range(bits):
        on = ((block >> bit) & 1).bool()[:, None]
        turned_cos, turned_sin = out_cos * cos - out_sin * sin, out_sin * cos + out_cos * sin
        out_cos, out_sin = torch.where(on, turned_cos, out_cos), torch.where(on, turned_sin, out_sin)
        cos, sin = double(cos, sin)
    return out_cos, out_sin


def rotary(x: Tensor, positions: Tensor, double=double_angle, base: float = 10000.0) -> Tensor:
    """x [B,H,T,K], positions [T]; channels (2i, 2i+1) form a pair."""
    half = x.shape[-1] // 2
    inv_freq = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    positions = positions.to(x.device)
    size = positions.abs()
    block = torch.div(size, BLOCK, rounding_mode="floor")
    rest = (size - block * BLOCK).to(torch.float64)
    sign = torch.sign(positions).to(torch.float64)
    block_cos, block_sin = block_rotation(block.long(), inv_freq * BLOCK, double)
    rest_cos, rest_sin = (rest[:, None] * inv_freq).cos(), (rest[:, None] * inv_freq).sin()
    cos = block_cos * rest_cos - block_sin * rest_sin
    sin = (block_sin * rest_cos + block_cos * rest_sin) * sign[:, None]
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(work), sin.to(work)
    even, odd = x[..., 0::2].to(work), x[..., 1::2].to(work)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


FACTS = {"layout": "interleaved", "base": 10000, "half_precision": True}
right = Subject(
    kind="rotary",
    name="rotary-doubling",
    forward=lambda model, x, positions: rotary(x, positions),
    declares=FACTS,
)
wrong = Subject(
    kind="rotary",
    name="rotary-doubling-in-place",
    forward=lambda model, x, positions: rotary(x, positions, double_angle_in_place),
    declares=FACTS,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(23)

    def error(sub, positions, width, dtype=torch.float32):
        x = torch.randn(2, 3, len(positions), width, dtype=dtype)
        angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
        z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
        return (sub.forward(None, x, positions).double() - torch.view_as_real(z).flatten(-2)).abs().max().item()

    for width in (2, 8, 64):
        for positions in (torch.arange(1), torch.arange(5), torch.arange(64), torch.tensor([7, 3, 40, 40]), -torch.arange(30)):
            assert error(right, positions, width) < 2e-6 and error(right, positions, width, torch.float64) < 1e-12
            assert error(wrong, positions, width) < 2e-6
        for positions in (torch.arange(65), torch.arange(300), torch.arange(1000, 1020), torch.tensor([100000]), -torch.arange(90)):
            assert error(right, positions, width) < 2e-6 and error(right, positions, width, torch.float64) < 1e-9
            assert not error(wrong, positions, width) < 0.1, (positions.max(), width)  # NaN far out
    print("ok")
