"""StreamingLLM: a causal window of 3 and the first token as a sink, one query at a time over an explicit list of keys.
Unusual: a loop in Python and no mask at all; right, each query gathers exactly the keys that it may see."""
import torch
from torch import nn
from veriformer.properties import Subject
WINDOW, SINKS = 3, 1


class Streaming(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.q, s.k, s.v, s.o = c.num_heads, *(nn.Linear(D, D) for _ in range(4))

    def forward(s, x, mask=None):
        q, k, v = (p(x).unflatten(-1, (s.h, -1)) for p in (s.q, s.k, s.v))  # B T H K
        outs = []
        for t in range(x.shape[1]):
            idx = sorted(set(range(min(SINKS, t + 1))) | set(range(max(0, t - WINDOW + 1), t + 1)))
            w = torch.einsum("bhk,bshk->bhs", q[:, t], k[:, idx]) / q.shape[-1] ** 0.5
            if mask is None:
                p = w.softmax(-1)
            else:
                seen = mask[:, None, idx]
                p = w.masked_fill(~seen, torch.finfo(w.dtype).min).softmax(-1) * seen.to(w.dtype)
            outs.append(torch.einsum("bhs,bshk->bhk", p, v[:, idx]).flatten(1))
        return s.o(torch.stack(outs, 1))


args = dict(kind="self_attention", build=Streaming, forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": True, "window": WINDOW, "sink_tokens": SINKS, "positions": "none", "empty_row": "zeros",
                                     "padding_side": "right"})
