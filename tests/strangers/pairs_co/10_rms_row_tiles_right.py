"""RMSNorm with a backward by hand; the gradient of the gain is summed over tiles of rows, as a kernel's programs do."""
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

TILE = 4


class Rms(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain, eps):
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        rows = x.reshape(-1, x.shape[-1]).to(wide)
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, scale)
        return (rows * scale * gain.to(wide)).reshape(x.shape).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gain, scale = ctx.saved_tensors
        width = x.shape[-1]
        normed = x.reshape(-1, width).to(scale.dtype) * scale
        rows = grad.reshape(-1, width).to(scale.dtype)
        inner = rows * gain.to(scale.dtype)
        dx = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        programs = -(-rows.shape[0] // TILE)
        dgain = torch.zeros_like(gain, dtype=scale.dtype)
        for program in range(programs):
            mine = slice(program * TILE, (program + 1) * TILE)
            dgain = dgain + (rows[mine] * normed[mine]).sum(0)
        return dx.reshape(x.shape).to(x.dtype), dgain.to(gain.dtype), None


class RmsNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.gain, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return Rms.apply(x, self.gain, self.eps)


subject = Subject(
    kind="norm",
    name="RMSNorm in tiles of rows",
    build=lambda c: RmsNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "rms", "once_differentiable": True},
)
