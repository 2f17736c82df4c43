"""Cross-attention of a Whisper-like decoder."""

import torch
from torch import nn

from veriformer.properties import Subject


def cross(merge):
    class CrossAttention(nn.Module):
        def __init__(self, n_state, n_head):
            super().__init__()
            self.n_head = n_head
            self.query = nn.Linear(n_state, n_state)
            self.key = nn.Linear(n_state, n_state, bias=False)
            self.value = nn.Linear(n_state, n_state)
            self.out = nn.Linear(n_state, n_state)

        def forward(self, x, xa, mask=None):
            b, t, d = x.shape
            s = xa.shape[1]
            scale = (d // self.n_head) ** -0.25
            q = self.query(x).view(b, t, self.n_head, -1).permute(0, 2, 1, 3) * scale
            k = self.key(xa).view(b, s, self.n_head, -1).permute(0, 2, 3, 1) * scale
            v = self.value(xa).view(b, s, self.n_head, -1).permute(0, 2, 1, 3)
            qk = q @ k
            if mask is not None:
                qk = qk.masked_fill(~mask[:, None, None, :], torch.finfo(qk.dtype).min)
            return self.out(merge(qk.softmax(dim=-1) @ v, b, t, d))

    return CrossAttention


def subject(cls):
    return Subject(
        kind="cross_attention",
        name="whisper cross-attention",
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    )


right = subject(cross(lambda wv, b, t, d: wv.permute(0, 2, 1, 3).flatten(start_dim=2)))
wrong = subject(cross(lambda wv, b, t, d: wv.reshape(b, t, d)))
WHAT = "[B, H, T, d] is reshaped to [B, T, D] without transposing heads and positions back"
CAUSE = (
    "Heads are merged without swapping the head and the position axis back: output t is made of what other queries gave, so "
    "positions of x are mixed up."
)
