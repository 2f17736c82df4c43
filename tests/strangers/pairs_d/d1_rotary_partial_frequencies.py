import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("Partial rotary: the frequencies of the 4 rotated channels are base^(-2i / d_head) instead of "
        "base^(-2i / rotary_dim), so all but the first pair turn too fast and the wavelengths end far too early.")
PLACE = "inverse frequencies of the partial rotary embedding, the denominator of the exponent"
ROT, BASE = 4, 10000.0


class PartialRotary(nn.Module):
    def __init__(self, d_head, buggy=False):
        super().__init__()
        over = d_head if buggy else ROT
        self.register_buffer("exponent", torch.arange(0, ROT, 2, dtype=torch.float64) / over, persistent=False)

    def forward(self, x, positions):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        freq = BASE ** -self.exponent.double()
        angle = positions.double()[:, None] * freq
        cos, sin = angle.cos().to(wide.dtype), angle.sin().to(wide.dtype)
        a, b, rest = wide.split([ROT // 2, ROT // 2, x.shape[-1] - ROT], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1).to(x.dtype)


FACTS = {"layout": "halves", "rotary_dim": ROT, "base": BASE}
SIZES = {"d_model": [32, 48, 64], "num_heads": [2, 4]}
right = Subject(kind="rotary", build=lambda c: PartialRotary(c.d_model // c.num_heads), declares=FACTS, domain=SIZES,
                name="partial rotary")
wrong = Subject(kind="rotary", build=lambda c: PartialRotary(c.d_model // c.num_heads, True), declares=FACTS, domain=SIZES,
                name="partial rotary")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    t = torch.arange(9)
    naive = x.clone()
    for p in range(9):
        for i in range(ROT // 2):
            turn = torch.tensor(p * BASE ** (-2 * i / ROT), dtype=torch.float64)
            u = torch.complex(x[:, :, p, i], x[:, :, p, i + ROT // 2]) * torch.polar(torch.ones_like(turn), turn)
            naive[:, :, p, i], naive[:, :, p, i + ROT // 2] = u.real, u.imag
    gap = [(PartialRotary(16, b)(x, t) - naive).abs().amax((0, 1, 2)) for b in (False, True)]
    print(gap)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    turned = lambda m, v, at: m(v.expand(1, 1, 1, 16), torch.tensor([at])).flatten()
    for b in (False, True):  # both still are relative: that alone does not tell them apart
        m = PartialRotary(16, b)
        assert (turned(m, q, 7) @ turned(m, k, 3) - turned(m, q, 14) @ turned(m, k, 10)).abs() < 1e-12
    assert gap[0].max() < 1e-12 and gap[1][[1, 3]].min() > 1e-2 and gap[1][[0, 2]].max() < 1e-12
