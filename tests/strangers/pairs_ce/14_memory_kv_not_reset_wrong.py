WHAT = "Keys and values of the memory are kept over the chunks of queries and not dropped at the end of forward (self._kv = None is missing), so without gradients the next call with a memory of the same shape attends to the previous one."
import torch
from torch import nn

from veriformer.properties import Subject


class ChunkedCrossAttention(nn.Module):
    """Queries go chunk by chunk to bound the scores; the memory is projected once."""

    def __init__(self, d, h, chunk=4):
        super().__init__()
        self.h, self.chunk = h, chunk
        self.to_q, self.to_kv, self.to_out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self._kv = None

    def _split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def _project(self, memory):
        kv = self._kv
        if kv is not None and (kv[0].shape[0], kv[0].shape[2]) == memory.shape[:2] and kv[0].dtype == memory.dtype:
            if not torch.is_grad_enabled():
                return kv
        k, v = (self._split(part) for part in self.to_kv(memory).chunk(2, -1))
        if not torch.is_grad_enabled():
            self._kv = (k, v)
        return k, v

    def forward(self, x, memory, memory_mask=None):
        out = []
        for part in x.split(self.chunk, dim=1):
            k, v = self._project(memory)
            q = self._split(self.to_q(part))
            scores = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
            if memory_mask is not None:
                scores = scores.masked_fill(~memory_mask[:, None, None, :], float("-inf"))
            y = torch.einsum("bhts,bhsk->bthk", scores.softmax(-1), v)
            out.append(self.to_out(y.flatten(2)))
        return torch.cat(out, dim=1)


subject = Subject(
    kind="cross_attention",
    name="chunked cross-attention",
    build=lambda c: ChunkedCrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    mask_forms=("padding",),
    declares={"positions": "none", "bias": True},
)
