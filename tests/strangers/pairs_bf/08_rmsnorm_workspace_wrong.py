WHAT = 'Without gradients the result is written into a workspace that is kept from call to call for inputs of the same shape (lines 17 to 23): the second call overwrites what the first one gave, which its caller still holds.'
"""RMSNorm with a lean path for inference: two passes, no temporaries besides the output."""
import torch
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self._workspace = None

    def output_like(self, x):
        kept = self._workspace
        if (
            kept is None
            or (kept.shape, kept.dtype, kept.device) != (x.shape, x.dtype, x.device)
            or kept.is_inference() != torch.is_inference_mode_enabled()
        ):
            self._workspace = torch.empty_like(x)
        return self._workspace

    def forward(self, x):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if torch.is_grad_enabled():
            return x * rstd * self.weight
        out = self.output_like(x)
        torch.mul(x, rstd, out=out)
        return out.mul_(self.weight)


subject = Subject(
    kind="norm",
    name="RMSNorm",
    build=lambda c: RMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False},
)
