"""Text over audio frames: cross-attention with the heads folded into the batch, products by bmm."""
import torch
from torch import nn

from veriformer.properties import Subject


class AudioCrossAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def fold(self, t):
        n, length, width = t.shape
        t = t.reshape(n, length, self.n_head, width // self.n_head)
        return t.transpose(1, 2).reshape(n * self.n_head, length, width // self.n_head)

    def unfold(self, t, n):
        t = t.reshape(n, self.n_head, t.shape[1], t.shape[2])
        return t.transpose(1, 2).flatten(2)

    def forward(self, text, audio, frames=None):
        q, k, v = self.fold(self.query(text)), self.fold(self.key(audio)), self.fold(self.value(audio))
        scale = q.shape[-1] ** -0.25  # on both sides, for half precision
        qk = torch.bmm(q * scale, (k * scale).transpose(1, 2))
        if frames is not None:
            silent = ~frames.repeat(self.n_head, 1)
            qk = qk.masked_fill(silent[:, None, :], torch.finfo(qk.dtype).min)
        return self.out(self.unfold(torch.bmm(qk.softmax(-1), v), text.shape[0]))


subject = Subject(
    kind="cross_attention",
    name="text over audio",
    build=lambda c: AudioCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"attention_scale": "1/sqrt(d_head)"},
)

WHAT = 'The mask is repeated head by head while the products lie sample by sample (line 31): with more than one sample and head, heads are masked by the frames of other samples.'
