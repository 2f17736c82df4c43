"""A pre-norm encoder layer with a fast path for inference: one fused function where no gradient is asked for."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def bias_gelu(x, bias):
    return F.gelu(x + bias)


def fused_layer(x, allowed, heads, n1, w_in, b_in, w_o, b_o, n2, w1, b1, w2, b2):
    B, T, D = x.shape
    h = F.layer_norm(x, (D,), *n1)
    qkv = torch.addmm(b_in, h.view(B * T, D), w_in.t()).view(B, T, 3, heads, D // heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    x = torch.addmm(b_o, y.transpose(1, 2).reshape(B * T, D), w_o.t()).view(B, T, D).add_(x)
    h = F.layer_norm(x, (D,), *n2)
    h = bias_gelu(h.view(B * T, D) @ w1.t(), b1)
    return torch.addmm(b2, h, w2.t()).view(B, T, D).add_(x)


class EncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward, dropout):
        super().__init__()
        self.nhead = nhead
        self.in_proj, self.out_proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.linear1, self.linear2 = nn.Linear(d_model, dim_feedforward), nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, src, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        if not self.training and not torch.is_grad_enabled():
            return fused_layer(
                src.contiguous(), allowed, self.nhead, (self.norm1.weight, self.norm1.bias), self.in_proj.weight,
                self.in_proj.bias, self.out_proj.weight, self.out_proj.bias, (self.norm2.weight, self.norm2.bias),
                self.linear1.weight, self.linear1.bias, self.linear2.weight, self.linear2.bias,
            )
        src = src + self._sa_block(self.norm1(src), allowed)
        return src + self.dropout2(self.linear2(F.gelu(self.linear1(self.norm2(src)))))

    def _sa_block(self, x, allowed):
        B, T, D = x.shape
        q, k, v = self.in_proj(x).view(B, T, 3, self.nhead, D // self.nhead).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.dropout1(self.out_proj(y.transpose(1, 2).reshape(B, T, D)))


subject = Subject(
    kind="layer",
    name="layer with a fused path",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu",
        "bias": True, "stacked": False,
    },
)
