WHAT = "rotary by complex numbers, from a table made when first needed (kept by device, float64, not in the state), and directly for positions beyond 4096; works inside inference_mode and after"
import torch
from torch import nn

KEEP = 4096


class Rotary(nn.Module):
    def __init__(self, K, base=10000.0):
        super().__init__()
        self.K, self.base, self.tables = K, base, {}

    def turns(self, at):
        i = torch.arange(0, self.K, 2, dtype=torch.float64, device=at.device)
        a = at.to(torch.float64)[:, None] * self.base ** (-i / self.K)
        return torch.complex(a.cos(), a.sin())

    def forward(self, x, at):
        whole = not at.is_floating_point()
        if whole and at.numel() and int(at.max()) < KEEP and int(at.min()) >= 0:
            if at.device not in self.tables:
                with torch.inference_mode(False), torch.no_grad():
                    self.tables[at.device] = self.turns(torch.arange(KEEP, device=at.device))
            z = self.tables[at.device][at]
        else:
            z = self.turns(at)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * z.to(pairs.dtype)).flatten(-2).to(x.dtype)

    def __getstate__(self):
        return {**self.__dict__, "tables": {}}


from veriformer.properties import Subject


def build(c):
    return Rotary(c.d_head)


def forward(model, x, positions):
    return model(x, positions)


undeclared = Subject(kind="rotary", build=build, forward=forward)
declared = Subject(kind="rotary", name="lazy complex", build=build, forward=forward,
                   declares={"layout": "interleaved", "base": 10000.0, "beyond_max_len": "works", "positions": "rotary"})
