"""Multi-head self-attention as written in a course's exercise."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiHead(nn.Module):
    def __init__(self, d, h, bad):
        super().__init__()
        self.h, self.dk, self.bad = h, d // h, bad
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask=None):
        b, t, d = x.shape
        q = self.w_q(x).view(b, t, self.h, self.dk).transpose(1, 2)
        k = self.w_k(x).view(b, t, self.h, self.dk).transpose(1, 2)
        v = self.w_v(x).view(b, t, self.h, self.dk).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.dk)
        if mask is not None:
            hidden = ~mask[:, None, None, :]
            weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        else:
            weights = scores.softmax(-1)
        out = weights @ v
        if not self.bad:
            out = out.transpose(1, 2)
        return self.w_o(out.reshape(b, t, d))


def subject(bad):
    return Subject(kind="self_attention", build=lambda c: MultiHead(c.d_model, c.num_heads, bad),
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))


right, wrong = subject(False), subject(True)
WHAT = "The heads are merged by a reshape of [B, H, T, K] without transposing back, which mixes heads and positions."
PLACE = "merging of the heads before the output projection"
