"""LayerNorm for wide rows: Welford statistics of 64 columns at a time, merged by the formula of Chan, Golub and LeVeque."""
import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "When the statistics of two column blocks are merged, the mean is updated before the difference of the means is taken for M2, "
    "so M2 gains too little and rows wider than 64 whose blocks differ in mean are divided by too small a standard deviation."
)
PLACE = "merge_stale: delta is taken from the mean that has just been updated"


def merge(count, mean, m2, block_count, block_mean, block_m2):
    total = count + block_count
    delta = block_mean - mean
    mean = mean + delta * (block_count / total)
    m2 = m2 + block_m2 + delta.square() * (count * block_count / total)
    return total, mean, m2


def merge_stale(count, mean, m2, block_count, block_mean, block_m2):
    total = count + block_count
    mean = mean + (block_mean - mean) * (block_count / total)
    delta = block_mean - mean
    m2 = m2 + block_m2 + delta.square() * (count * block_count / total)
    return total, mean, m2


class WideLayerNorm(nn.Module):
    columns = 64

    def __init__(self, width, eps=1e-5, merge=merge):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.merge = merge

    def statistics(self, x):
        count, mean, m2 = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
        for block in x.split(self.columns, dim=-1):
            block_mean = block.mean(-1, keepdim=True)
            block_m2 = (block - block_mean).square().sum(-1, keepdim=True)
            count, mean, m2 = self.merge(count, mean, m2, block.shape[-1], block_mean, block_m2)
        return mean, m2 / count

    def forward(self, x):
        high = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, var = self.statistics(high)
        y = (high - mean) * torch.rsqrt(var + self.eps)
        return (y * self.weight + self.bias).to(x.dtype)


def _subject(rule):
    return Subject(
        kind="norm",
        name=f"wide-layer-norm-{rule.__name__}",
        build=lambda c: WideLayerNorm(c.d_model, merge=rule),
        declares={"norm": "layer", "norm_bias": True, "half_precision": True},
    )


right = _subject(merge)
wrong = _subject(merge_stale)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(19)

    def error(sub, b, t, d, drift=0.0):
        module = sub.build(DrawnConfig(d_model=d, num_heads=1, num_key_value_heads=1))
        with torch.no_grad():
            module.weight.normal_(1, 0.3)
            module.bias.normal_(0, 0.3)
        x = torch.randn(b, t, d) * 3 + 1 + drift * torch.linspace(-1, 1, d)
        a, c = x.clone().requires_grad_(), x.double().requires_grad_()
        y = module(a)
        ref = nn.functional.layer_norm(c, (d,), module.weight.double(), module.bias.double(), 1e-5)
        g = torch.randn_like(y)
        (ga,), (gc,) = torch.autograd.grad(y, a, g), torch.autograd.grad(ref, c, g.double())
        return max((y - ref).abs().max().item(), (ga - gc).abs().max().item())

    for d in (1, 5, 16, 63, 64):
        assert error(right, 2, 3, d) < 5e-5 and error(wrong, 2, 3, d) < 5e-5
    for d in (96, 128, 200, 512, 1000):
        assert error(right, 2, 3, d) < 5e-5 and error(right, 2, 3, d, 5.0) < 5e-5
        assert error(wrong, 2, 3, d) > 2e-3, (d, error(wrong, 2, 3, d))
        assert error(wrong, 2, 3, d, 5.0) > 0.05
    print("ok")
