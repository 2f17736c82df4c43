WHAT = "the gain is stored as its distance from one (1 + weight) and yet begins at ones, so that a fresh norm multiplies by two (line 27)"

"""RMSNorm as Gemma 3 and Qwen3-Next have it: zero-centred gain, sums in float32 at least."""

import torch
from torch import nn

from veriformer.properties import Subject


class ZeroCentredRMSNorm(nn.Module):
    """y = x / rms(x) * (1 + weight).

    The gain is kept as its distance from one, so that weight decay pulls it to one and not to zero. The statistics
    are computed in float32 for half precision inputs; the product with the gain is taken before the result is cast
    back, as in Gemma (Llama casts first).
    """

    def __init__(self, dim, eps=1e-6, device=None, dtype=None):
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def _normalise(self, x):
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps)

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        y = self._normalise(wide) * (1.0 + self.weight.to(wide.dtype))
        return y.to(x.dtype)

    def extra_repr(self):
        return f"{self.dim}, eps={self.eps}"


def build(c):
    return ZeroCentredRMSNorm(c.d_model)


subject = Subject(
    kind="norm",
    name="zero-centred RMSNorm",
    build=build,
    forward=lambda model, x: model(x),
    declares={"norm": "rms"},
)
