"""ALiBi as llama.cpp's soft_max_ext builds it: slopes from max_bias and the largest power of two not above the heads."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class AlibiBias(nn.Module):
    def __init__(self, n_head, max_bias=8.0):
        super().__init__()
        n_head_log2 = 1 << int(math.floor(math.log2(n_head)))
        m0 = 2.0 ** (-max_bias / n_head_log2)
        m1 = 2.0 ** (-(max_bias / 2.0) / n_head_log2)
        self.slopes = [
            m0 ** (h + 1) if h < n_head_log2 else m1 ** (2 * (h - n_head_log2))
            for h in range(n_head)
        ]
        self.register_buffer("like", torch.zeros(()))

    def forward(self, n_q, n_kv):
        if n_q != n_kv:
            raise ValueError("a whole sequence is expected")
        pos = torch.arange(n_kv, device=self.like.device)
        distance = (pos[:, None] - pos[None, :]).abs().to(self.like.dtype)
        slopes = torch.tensor(self.slopes, dtype=self.like.dtype, device=self.like.device)
        return -slopes[:, None, None] * distance


subject = Subject(
    kind="position_bias",
    name="alibi of llama.cpp",
    build=lambda c: AlibiBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "alibi", "slopes": "interleaved"},
)
WHAT = "The heads beyond the power of two take even powers of m1, beginning with 0, where the odd ones are meant (line 17): with 3, 5, 6, 7... heads the first of them has slope 1 and others repeat slopes that are there already."
