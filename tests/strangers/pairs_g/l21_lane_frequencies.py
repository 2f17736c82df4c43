"""Rotary embedding as its author writes the kernel: one warp a row, lane l takes pairs l, l + 32, l + 64, ... of the head."""

import torch

from veriformer.properties import Subject

WHAT = (
    "Each lane of the warp computes its frequency from the lane number alone and keeps it for all pairs that it takes: heads "
    "wider than 64 channels turn the pairs from 32 on with the frequencies of pairs 0, 1, 2 ... again."
)
PLACE = "frequency_of_lane"

WARP = 32
BASE = 10000.0


def frequency_of_pair(lane, step, width):
    return BASE ** (-2.0 * (lane + step * WARP).double() / width)


def frequency_of_lane(lane, step, width):
    return BASE ** (-2.0 * lane.double() / width)


class RotaryKernel:
    def __init__(self, width, frequency):
        assert width % 2 == 0
        self.width, self.frequency = width, frequency

    def __call__(self, x, positions):
        half = self.width // 2
        out = torch.empty_like(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        for step in range(-(-half // WARP)):  # while (pair < half) pair += WARP
            lane = torch.arange(min(WARP, half - step * WARP), device=x.device)
            pair = lane + step * WARP
            angle = positions.double()[:, None] * self.frequency(lane, step, self.width)
            cos, sin = angle.cos().to(wide), angle.sin().to(wide)
            a, b = x[..., pair].to(wide), x[..., pair + half].to(wide)
            out[..., pair] = (a * cos - b * sin).to(x.dtype)
            out[..., pair + half] = (b * cos + a * sin).to(x.dtype)
        return out


def subject(frequency, name):
    return Subject(
        kind="rotary",
        build=lambda c: RotaryKernel(c.d_head, frequency),
        forward=lambda m, x, positions: m(x, positions),
        name=name,
        domain={"d_model": [32, 64, 128, 192], "num_heads": [2]},
        declares={"positions": "rotary", "layout": "halves", "base": 10000, "beyond_max_len": "works"},
    )


right = subject(frequency_of_pair, "warp-rotary")
wrong = subject(frequency_of_lane, "warp-rotary-lane")


def reference(x, positions):
    half = x.shape[-1] // 2
    z = torch.complex(x.double()[..., :half], x.double()[..., half:])
    angle = positions.double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for width, same in [(2, True), (8, True), (24, True), (64, True), (80, False), (96, False), (128, False)]:
        good, bad = RotaryKernel(width, frequency_of_pair), RotaryKernel(width, frequency_of_lane)
        for positions in (torch.arange(9), torch.arange(500, 530), torch.tensor([7, 3, 2000])):
            x = torch.randn(2, 3, len(positions), width)
            want = reference(x, positions)
            assert (good(x, positions) - want).abs().max() < 1e-5
            assert (good(x.double(), positions) - want).abs().max() < 1e-11
            off = (bad(x, positions) - want).abs().max()
            assert (off < 1e-5) == same and (same or off > 0.3), (width, off)
            y = x.double().requires_grad_()
            (g,) = torch.autograd.grad((good(y, positions) * want).sum(), y)
            assert (g - x).abs().max() < 1e-9  # a rotation: its transpose undoes it
    print("ok", __file__)
