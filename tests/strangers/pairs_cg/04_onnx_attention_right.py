"""com.microsoft.Attention after an exporter's fusion: one input-major weight [D, 3D], one bias [3D], the scale folded into q."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class FusedAttention(nn.Module):
    def __init__(self, hidden, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.weights = nn.Parameter(torch.randn(hidden, 3 * hidden) / hidden**0.5)
        self.bias = nn.Parameter(torch.randn(3 * hidden) * 0.5)
        self.out_weight = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.out_bias = nn.Parameter(torch.randn(hidden) * 0.5)

    def folded(self):
        D = self.weights.shape[0]
        scale = (D // self.num_heads) ** -0.5
        w_q, w_kv = self.weights[:, :D], self.weights[:, D:]
        b_q, b_kv = self.bias[:D], self.bias[D:]
        return torch.cat([w_q * scale, w_kv], 1), torch.cat([b_q * scale, b_kv])

    def forward(self, x, mask=None):
        B, T, D = x.shape
        w, b = self.folded()
        q, k, v = (x @ w + b).view(B, T, 3, self.num_heads, D // self.num_heads).permute(2, 0, 3, 1, 4)
        s = q @ k.mT
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        y = (F.softmax(s, -1) @ v).transpose(1, 2).reshape(B, T, D)
        return y @ self.out_weight + self.out_bias


def projections(m):
    D = m.weights.shape[0]
    w, b = m.weights.data, m.bias.data
    return {
        "q": w[:, :D].T, "k": w[:, D : 2 * D].T, "v": w[:, 2 * D :].T, "o": m.out_weight.data.T,
        "q_bias": b[:D], "k_bias": b[D : 2 * D], "v_bias": b[2 * D :], "o_bias": m.out_bias.data,
    }


subject = Subject(
    kind="self_attention",
    name="fused ONNX attention",
    build=lambda c: FusedAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    projections=projections,
    declares={"causal": False, "positions": "none", "attention_scale": "1/sqrt(d_head)"},
)
