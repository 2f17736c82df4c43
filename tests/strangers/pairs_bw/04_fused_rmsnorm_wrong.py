WHAT = "backward of FusedRMSNorm sums the gain's gradient over whole blocks of rows alone (range(0, n - n % ROWS, ROWS)): the rows of the last, partial block are lost from dw"
import torch
from torch import nn
from veriformer.properties import Subject

ROWS = 4  # rows a program of the reduction takes


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat = x * rstd
        wdy = dy * weight
        dx = (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)) * rstd
        rows = (dy * xhat).reshape(-1, x.shape[-1])
        n = rows.shape[0]
        partial = [rows[i : i + ROWS].sum(0) for i in range(0, n - n % ROWS, ROWS)]
        dw = torch.stack(partial).sum(0) if partial else torch.zeros_like(weight)
        return dx, dw, None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return FusedRMSNorm.apply(x, self.weight, self.eps)


subject = Subject(kind="norm", build=lambda c: RMSNorm(c.d_model), forward=lambda m, x: m(x),
                  declares={"norm": "rms", "norm_bias": False, "once_differentiable": True})
