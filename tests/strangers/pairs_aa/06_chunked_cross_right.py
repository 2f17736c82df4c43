"""Cross-attention that, in inference, goes through long queries by chunks and projects the memory once."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    CHUNK = 4

    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)
        self._kv = None

    def _split(self, t):
        return t.view(*t.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)

    def _project(self, xa):
        return self._split(self.key(xa)), self._split(self.value(xa))

    def _qkv_attention(self, x, k, v, mask):
        q = self._split(self.query(x))
        qk = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if mask is not None:
            qk = qk.masked_fill(~mask[:, None, None, :], torch.finfo(qk.dtype).min)
        w = qk.softmax(dim=-1)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))

    def _chunk(self, x, xa, mask):
        kv = self._kv
        if kv is None or kv[0].shape[0] != xa.shape[0] or kv[0].shape[2] != xa.shape[1]:
            kv = self._kv = self._project(xa)
        return self._qkv_attention(x, *kv, mask)

    def forward(self, x, xa, mask=None):
        if torch.is_grad_enabled():
            return self._qkv_attention(x, *self._project(xa), mask)
        out = torch.cat([self._chunk(part, xa, mask) for part in x.split(self.CHUNK, dim=1)], dim=1)
        self._kv = None
        return out


subject = Subject(
    kind="cross_attention",
    name="chunked cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"positions": "none", "empty_row": "mean"},
)
