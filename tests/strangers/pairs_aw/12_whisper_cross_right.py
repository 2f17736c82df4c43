"""Whisper's MultiHeadAttention, used as cross-attention: both factors get d_head ** -0.25, keys have no bias."""
from typing import Optional

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Optional[Tensor] = None, mask: Optional[Tensor] = None):
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        return self.out(self.qkv_attention(q, k, v, mask))

    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor] = None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk.masked_fill(~mask[:, None, None, :], torch.finfo(qk.dtype).min)
        w = qk.softmax(dim=-1)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2)


def projections(model):
    return {
        "q": model.query.weight,
        "k": model.key.weight,
        "v": model.value.weight,
        "o": model.out.weight,
        "q_bias": model.query.bias,
        "v_bias": model.value.bias,
        "o_bias": model.out.bias,
    }


subject = Subject(
    kind="cross_attention",
    name="Whisper cross-attention",
    build=lambda c: MultiHeadAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    projections=projections,
    declares={"attention_scale": "1/sqrt(d_head)", "positions": "none"},
)
