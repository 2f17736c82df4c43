import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("The LayerNorm that merges mean and squared deviations tile by tile (Chan's formula) takes the full tile width for "
        "the count of the last, shorter tile, so its statistics are wrong where the width is no multiple of 8.")
PLACE = "merge of partial moments, the count of the ragged last tile"
TILE = 8


class TiledLayerNorm(nn.Module):
    def __init__(self, d, buggy=False):
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.buggy = buggy

    def forward(self, x):
        kind = x.dtype
        wide = x.float() if kind in (torch.float16, torch.bfloat16) else x
        D = x.shape[-1]
        seen, mean, dev = 0, 0.0, 0.0
        for a in range(0, D, TILE):
            part = wide[..., a:a + TILE]
            count = TILE if self.buggy else part.shape[-1]
            mid = part.mean(-1, keepdim=True)
            own = (part - mid).square().sum(-1, keepdim=True)
            if seen == 0:
                seen, mean, dev = count, mid, own
                continue
            delta = mid - mean
            both = seen + count
            mean = mean + delta * (count / both)
            dev = dev + own + delta.square() * (seen * count / both)
            seen = both
        y = (wide - mean) * torch.rsqrt(dev / D + 1e-5)
        return (y * self.gain.to(wide.dtype) + self.shift.to(wide.dtype)).to(kind)


FACTS = {"norm": "layer", "norm_bias": True}
right = Subject(kind="norm", build=lambda c: TiledLayerNorm(c.d_model), declares=FACTS, name="tiled layer norm")
wrong = Subject(kind="norm", build=lambda c: TiledLayerNorm(c.d_model, True), declares=FACTS, name="tiled layer norm")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gap = {}
    for D in (8, 12, 16, 20, 32):
        x = 3 * torch.randn(2, 5, D, dtype=torch.float64) + 2
        mean = x.sum(-1, keepdim=True) / D
        naive = (x - mean) / (((x - mean) ** 2).sum(-1, keepdim=True) / D + 1e-5).sqrt()
        gap[D] = [(TiledLayerNorm(D, b).double()(x) - naive).abs().max().item() for b in (False, True)]
    print(gap)
    assert all(g[0] < 1e-12 for g in gap.values())
    assert all((g[1] > 1e-2) == bool(D % TILE) for D, g in gap.items())
