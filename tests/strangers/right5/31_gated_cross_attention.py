WHAT = "cross-attention with keys and values fused head by head, an output gate per head from the query's own input, and a boolean mask into scaled_dot_product_attention made safe for samples whose memory is all hidden (zeros, no NaN)"
import torch
from torch import nn
from torch.nn import functional as F


class GatedCross(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.h, self.p = h, p
        self.to_q, self.to_kv, self.to_out = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d)
        self.gate = nn.Linear(d, h)

    def forward(self, x, memory, mask=None):
        B, T, D = x.shape
        q = self.to_q(x).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k, v = self.to_kv(memory).unflatten(-1, (self.h, 2, -1)).transpose(1, 2).unbind(3)
        allowed = some = None
        if mask is not None:
            some = mask.any(1)
            allowed = (mask | ~some[:, None])[:, None, None].expand(B, 1, T, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=self.p if self.training else 0.0)
        if some is not None:
            y = torch.where(some[:, None, None, None], y, 0.0)
        y = y * torch.sigmoid(self.gate(x)).transpose(1, 2)[..., None]
        return self.to_out(y.transpose(1, 2).reshape(B, T, D))


from veriformer.properties import Subject


def build(c):
    return GatedCross(c.d_model, c.num_heads, c.dropout)


def forward(model, x, memory, memory_mask=None):
    return model(x, memory, memory_mask)


undeclared = Subject(kind="cross_attention", build=build, forward=forward)
declared = Subject(
    kind="cross_attention", name="gated cross", build=build, forward=forward,
    declares={"positions": "none", "structure": "other", "padding_side": "both"},
)
