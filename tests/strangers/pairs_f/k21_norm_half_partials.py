"""RMSNorm as a pair of kernels. Rows that fit into one block of 128 take the fused kernel; wider rows are split: the first kernel
writes one partial sum of squares a block to global memory, the second adds them up and scales."""
import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The buffer of partial sums of squares has the dtype of x: in float16 a row wider than 128 whose squares sum to more than 65504 "
    "(1024 channels with an RMS of 8) overflows to inf and is normalised to zeros; narrower rows are summed in float32."
)
PLACE = "SplitRMSNorm.square_sum: partials allocated like x"

BLOCK = 128


class SplitRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6, partials_like_x: bool = False):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps
        self.partials_like_x = partials_like_x

    def square_sum(self, x):
        compute = torch.promote_types(x.dtype, torch.float32)
        if x.shape[-1] <= BLOCK:
            return x.to(compute).pow(2).sum(-1, keepdim=True)
        store = x.dtype if self.partials_like_x else compute
        partials = [block.to(compute).pow(2).sum(-1).to(store) for block in x.split(BLOCK, dim=-1)]
        return torch.stack(partials, dim=-1).sum(-1, keepdim=True).to(compute)

    def forward(self, x):
        total = self.square_sum(x)
        scale = torch.rsqrt(total / x.shape[-1] + self.eps)
        return (x.to(scale.dtype) * scale * self.gain.to(scale.dtype)).to(x.dtype)


declares = {"norm": "rms", "norm_bias": False, "half_precision": True}
right = Subject(kind="norm", name="split-rms", build=lambda c: SplitRMSNorm(c.d_model), declares=declares)
wrong = Subject(
    kind="norm",
    name="split-rms-narrow",
    build=lambda c: SplitRMSNorm(c.d_model, partials_like_x=True),
    declares=declares,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(20)

    def error(sub, d, dtype, size):
        module = sub.build(DrawnConfig(d_model=d, num_heads=1, num_key_value_heads=1)).to(dtype)
        with torch.no_grad():
            module.gain.normal_(1, 0.3)
        x = (torch.randn(2, 5, d) * size).to(dtype)
        wide = x.double()
        ref = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * module.gain.double()
        return ((module(x).double() - ref).abs() / (ref.abs() + 0.1)).max().item()

    tiny = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
    for dtype, bound in tiny.items():
        for d in (4, 64, 128):
            for size in (0.1, 1.0, 20.0, 100.0):
                assert error(right, d, dtype, size) < bound
                assert error(wrong, d, dtype, size) < bound
        for d in (129, 300, 1024):
            assert error(right, d, dtype, 1.0) < bound and error(right, d, dtype, 20.0) < bound
            assert error(wrong, d, dtype, 1.0) < bound
    for d, size in [(300, 20.0), (1024, 9.0), (768, 12.0)]:
        assert error(right, d, torch.float16, size) < 4e-3
        assert error(wrong, d, torch.float16, size) > 0.9
    print("ok")
