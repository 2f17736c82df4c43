"""Rotary positions whose table is not made of sines and cosines of many angles but by doubling: the rows n .. 2n - 1 are
the rows 0 .. n - 1 turned by the angle of n (a trick of embedded and edge runtimes, where sin and cos are dear)."""

import torch

from veriformer.properties import Subject

WHAT = (
    "The table is built in the dtype of x. Each doubling doubles the rounding error of the step before, so that it grows "
    "in proportion to the position: in float32 that is the rounding of any table, in bfloat16 position 60 is off by a "
    "tenth and from about 300 on angles and lengths are wrong altogether."
)
PLACE = "table: dtype=x.dtype for the pairs of cosine and sine"
BASE = 10000.0


def table(length, half, dtype, device):
    """Cosines and sines `[length, half]`, by doubling."""
    angle = BASE ** (-torch.arange(half, dtype=torch.float64, device=device) / half)
    step_c, step_s = angle.cos().to(dtype), angle.sin().to(dtype)  # of the angle n, n = 1 at first
    c, s = torch.ones(1, half, dtype=dtype, device=device), torch.zeros(1, half, dtype=dtype, device=device)
    while len(c) < length:
        c, s = torch.cat((c, c * step_c - s * step_s)), torch.cat((s, s * step_c + c * step_s))
        step_c, step_s = step_c * step_c - step_s * step_s, 2 * step_c * step_s
    return c[:length], s[:length]


def make(dtype_of):
    def rotate(model, x, positions):
        """x `[B, H, T, K]`, positions `[T]`; channel i is turned with channel i + K / 2."""
        half = x.shape[-1] // 2
        away = positions.abs()
        c, s = table(int(away.max()) + 1, half, dtype_of(x), x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        c = c[away].to(wide)
        s = (s[away] * positions.sign()[:, None].to(s.dtype)).to(wide)
        a, b = x.to(wide).split(half, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1).to(x.dtype)

    return Subject(
        kind="rotary",
        name="rotary by doubling",
        forward=rotate,
        declares={"layout": "halves", "base": 10000, "half_precision": True},
    )


right, wrong = make(lambda x: torch.float64), make(lambda x: x.dtype)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-3), (torch.bfloat16, 0.03)):
        for first, count in ((0, 12), (50, 12), (290, 20), (900, 50)):
            x = torch.randn(2, 2, count, 16).to(dtype)
            positions = torch.arange(first, first + count)
            angle = positions[:, None].double() * BASE ** (-torch.arange(8).double() / 8)
            z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones((), dtype=torch.float64), angle)
            truth = torch.cat((z.real, z.imag), -1)
            a, b = ((f.forward(None, x, positions) - truth).abs().max().item() for f in (right, wrong))
            print(dtype, "from position", first, f"right {a:.1e} wrong {b:.1e}")
            assert a < small
            if dtype == torch.bfloat16:
                assert b > {0: 0.0, 50: 0.1, 290: 0.8, 900: 0.8}[first] and (b < 0.2 or first)
            else:
                assert b < small
            back = right.forward(None, right.forward(None, x.double(), positions), -positions)
            assert (back - x.double()).abs().max() < 1e-10
