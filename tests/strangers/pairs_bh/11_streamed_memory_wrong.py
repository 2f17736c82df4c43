WHAT = "the running softmax's denominator is not faded when the maximum rises (the accumulator is): the weights do not sum to 1 once the memory is longer than a block of four (line 35)."
"""Multi-query cross-attention over a long memory, streamed in blocks with a running softmax; half precision sums in float32."""
import torch
from torch import nn

from veriformer.properties import Subject

BLOCK = 4


class StreamedCrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * self.width, bias=False)  # one key-value head for all queries
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, memory, memory_mask=None):
        b, t, _ = x.shape
        q = self.to_q(x).view(b, t, self.heads, self.width) * self.width**-0.5
        acc_dtype = torch.promote_types(q.dtype, torch.float32)
        top = q.new_full((b, t, self.heads), torch.finfo(acc_dtype).min, dtype=acc_dtype)
        den = torch.zeros_like(top)
        acc = q.new_zeros(b, t, self.heads, self.width, dtype=acc_dtype)
        for start in range(0, memory.size(1), BLOCK):
            k, v = self.to_kv(memory[:, start : start + BLOCK]).to(acc_dtype).chunk(2, dim=-1)
            s = torch.einsum("bthc,bsc->bths", q.to(acc_dtype), k)
            if memory_mask is not None:
                seen = memory_mask[:, start : start + BLOCK]
                s = s.masked_fill(~seen[:, None, None, :], float("-inf"))
            new_top = torch.maximum(top, s.amax(-1))
            p = torch.exp(s - new_top[..., None])
            fade = torch.exp(top - new_top)
            den = den + p.sum(-1)
            acc = acc * fade[..., None] + torch.einsum("bths,bsc->bthc", p, v)
            top = new_top
        y = acc / den.clamp_min(torch.finfo(acc_dtype).tiny)[..., None]
        return self.to_out(y.to(x.dtype).flatten(2))


subject = Subject(
    kind="cross_attention",
    name="streamed cross-attention",
    build=lambda c: StreamedCrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"causal": False, "positions": "none", "bias": False},
)
