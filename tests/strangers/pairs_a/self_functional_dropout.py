import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'Attention dropout is called as F.dropout(weights, p) without training=self.training, so it stays on '
    'in eval mode and two eval calls differ.'
)
PLACE = 'dropout on the weights of self-attention, eval mode'


class Attention(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.h, self.p = h, p
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.to_out = nn.Linear(d, d, bias=False)

    def forward(self, x, attention_mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)) for f in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(-1) ** -0.5
        if attention_mask is not None:
            hidden = ~attention_mask[:, None, None, :]
            sim = sim.masked_fill(hidden, torch.finfo(sim.dtype).min)
        attn = sim.softmax(-1)
        if attention_mask is not None:
            attn = attn.masked_fill(hidden, 0.0)
        attn = F.dropout(attn, self.p, self.training)
        return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2))


class Attention2(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.h, self.p = h, p
        self.to_q, self.to_k, self.to_v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.to_out = nn.Linear(d, d, bias=False)

    def forward(self, x, attention_mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)) for f in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * q.size(-1) ** -0.5
        if attention_mask is not None:
            hidden = ~attention_mask[:, None, None, :]
            sim = sim.masked_fill(hidden, torch.finfo(sim.dtype).min)
        attn = sim.softmax(-1)
        if attention_mask is not None:
            attn = attn.masked_fill(hidden, 0.0)
        attn = F.dropout(attn, self.p)
        return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).flatten(2))


right = Subject(
    kind="self_attention",
    build=lambda c: Attention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": False, "empty_row": "zeros"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: Attention2(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": False, "empty_row": "zeros"},
    mask_forms=("padding",),
)
