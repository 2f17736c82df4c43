WHAT = "The backward of the fused RMSNorm projects with the incoming gradient, not with the gradient times the gain (line 23): the same while all gains are 1, wrong as soon as they are trained."
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties import Subject


class FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        x_hat = x * rstd
        wdy = dy * weight
        c1 = (dy * x_hat).mean(-1, keepdim=True)
        dx = (wdy - x_hat * c1) * rstd
        dweight = (dy * x_hat).flatten(0, -2).sum(0)
        return dx, dweight, None


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return FusedRMSNorm.apply(x, self.weight, self.eps)


def rotary(x):
    """[B, H, T, K], halves."""
    t, k = x.shape[-2], x.shape[-1]
    freq = 10000.0 ** (-torch.arange(0, k, 2, device=x.device, dtype=torch.float64) / k)
    phase = torch.arange(t, device=x.device, dtype=torch.float64)[:, None] * freq
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    a, b = x[..., : k // 2], x[..., k // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_attn, self.norm_ffn = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w_in, self.w_out = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_attn(x)).reshape(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotary(q), rotary(k)
        scores = torch.matmul(q, k.mT) * (d // self.heads) ** -0.5
        if bias is not None:
            scores = scores + bias
        x = x + self.out(torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(b, t, d))
        gate, up = self.w_in(self.norm_ffn(x)).chunk(2, dim=-1)
        return x + self.w_out(F.silu(gate) * up)


class NeoEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([EncoderBlock(dim, heads, hidden) for _ in range(layers)])
        self.norm = RMSNorm(dim)

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        bias = None
        if attention_mask is not None:
            bias = torch.zeros_like(attention_mask, dtype=x.dtype)
            bias = bias.masked_fill(~attention_mask, torch.finfo(x.dtype).min)[:, None, None, :]
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="fused norm",
    build=lambda c: NeoEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "padding_side": "both",
        "once_differentiable": True,
    },
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
)
