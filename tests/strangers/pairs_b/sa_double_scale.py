"""Self-attention moved from a hand-written softmax to F.scaled_dot_product_attention."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.p = c.num_heads, c.dropout
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.scale = (c.d_model // c.num_heads) ** -0.5 if bad else 1.0

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        allowed = None if attention_mask is None else attention_mask[:, None, None, :].expand(b, 1, t, t)
        y = F.scaled_dot_product_attention(q * self.scale, k, v, attn_mask=allowed, dropout_p=self.p if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


def subject(bad):
    return Subject(kind="self_attention", build=lambda c: SelfAttention(c, bad),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))


right, wrong = subject(False), subject(True)
WHAT = "The queries are scaled by 1/sqrt(d_head) and F.scaled_dot_product_attention scales once more, so that the scores are divided by d_head."
PLACE = "scale of the attention scores"
