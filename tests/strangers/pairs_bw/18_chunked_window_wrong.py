WHAT = "the chunked sliding window looks (window - 1) // chunk chunks back, rounded down in place of up: the first queries of a chunk lose the oldest keys of their window"
import torch
from torch import nn
from veriformer.properties import Subject

WINDOW, CHUNK = 4, 2


class ChunkedLocalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.back = (WINDOW - 1) // CHUNK  # chunks to look back

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.to_qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        outputs = []
        for start in range(0, T, CHUNK):
            stop, first = min(start + CHUNK, T), max(0, start - self.back * CHUNK)
            i = torch.arange(start, stop, device=x.device)[:, None]
            j = torch.arange(first, stop, device=x.device)[None]
            near = (j <= i) & (i - j < WINDOW)
            s = q[:, :, start:stop] @ k[:, :, first:stop].transpose(-1, -2) * q.shape[-1] ** -0.5
            outputs.append(s.masked_fill(~near, float("-inf")).softmax(-1) @ v[:, :, first:stop])
        return self.to_out(torch.cat(outputs, 2).transpose(1, 2).reshape(B, T, D))


def projections(m):
    q, k, v = m.to_qkv.weight.chunk(3, 0)
    return {"q": q, "k": k, "v": v, "o": m.to_out.weight}


subject = Subject(kind="self_attention", build=lambda c: ChunkedLocalAttention(c.d_model, c.num_heads), forward=lambda m, x: m(x),
                  projections=projections, declares={"causal": True, "window": WINDOW, "bias": False, "positions": "none"})
