"""Cross-attention with one key-value head for all queries (MQA), keys and values from one fused map, queries worked
through two at a time. A query whose memory is all padding gets the output bias alone (zeros before the projection)."""
import torch
from torch import nn
from veriformer.properties import Subject


class CrossMQA(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, K = c.d_model, c.d_model // c.num_heads
        s.h, s.K, s.q, s.kv, s.o = c.num_heads, K, nn.Linear(D, D), nn.Linear(D, 2 * K), nn.Linear(D, D)

    def forward(s, x, memory, mask=None):
        k, v = s.kv(memory).chunk(2, -1)
        outs = []
        for part in s.q(x).split(2, 1):
            q = part.unflatten(-1, (s.h, s.K))
            w = torch.einsum("bthk,bsk->bhts", q, k) * s.K**-0.5
            if mask is not None:
                m = mask[:, None, None]
                w = w.masked_fill(~m, torch.finfo(w.dtype).min).softmax(-1).masked_fill(~m, 0.0)
            else:
                w = w.softmax(-1)
            outs.append(torch.einsum("bhts,bsk->bthk", w, v).flatten(2))
        return s.o(torch.cat(outs, 1))


args = dict(kind="cross_attention", build=CrossMQA, forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"empty_row": "zeros", "structure": "other", "bias": True})
