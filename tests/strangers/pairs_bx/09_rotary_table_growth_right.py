import torch

from veriformer.properties import Subject


class ComplexRotary(torch.nn.Module):
    """Pairs of neighbours are complex numbers; the table grows when it has to."""

    def __init__(self, width, theta=10000.0, initial=16):
        super().__init__()
        if width % 2:
            raise ValueError("an even width is needed")
        self.width, self.theta = width, theta
        self.table = self.rows(torch.arange(initial))

    def rows(self, t):
        freqs = 1.0 / self.theta ** (torch.arange(0, self.width, 2, dtype=torch.float64) / self.width)
        angles = torch.outer(t.double(), freqs)
        return torch.polar(torch.ones_like(angles), angles)

    def grow(self, needed):
        have = len(self.table)
        if needed > have:
            fresh = self.rows(torch.arange(have, needed))
            self.table = torch.cat([self.table, fresh])

    def forward(self, x, positions):
        self.grow(int(positions.max()) + 1)
        turn = self.table.to(positions.device)[positions]
        wide = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(wide * turn).flatten(-2).to(x.dtype)


subject = Subject(
    kind="rotary",
    name="complex rotary with a growing table",
    build=lambda c: ComplexRotary(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000},
)
