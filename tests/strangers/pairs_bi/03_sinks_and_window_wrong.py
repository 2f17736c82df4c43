WHAT = 'The sink tokens are not taken out of the band: for queries whose window still reaches them they stand in the keys twice, as sinks and as neighbours, and get twice their weight (line 25: `& (j >= SINKS)` is missing).'
import torch
from einops import rearrange
from torch import nn

from veriformer.properties import Subject

WINDOW = 4
SINKS = 2


class StreamingAttention(nn.Module):
    """Sliding window and attention sinks: the keys are [the first SINKS tokens | all tokens, of which the band is seen]."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def mask(self, n, device):
        i = torch.arange(n, device=device)[:, None]
        j = torch.arange(n, device=device)[None, :]
        causal = j <= i
        band = causal & (i - j < WINDOW)
        return torch.cat([causal[:, :SINKS], band], dim=-1)

    def forward(self, x, keep=None):
        n = x.shape[1]
        q, k, v = rearrange(self.to_qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        k = torch.cat([k[:, :, :SINKS], k], dim=2)
        v = torch.cat([v[:, :, :SINKS], v], dim=2)
        mask = self.mask(n, x.device)
        if keep is not None:
            keep = torch.cat([keep[:, :SINKS], keep], dim=1)
            mask = mask & rearrange(keep, "b s -> b 1 1 s")
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
        sim = sim.masked_fill(~mask, torch.finfo(sim.dtype).min)
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


subject = Subject(
    kind="self_attention",
    name="sinks and a sliding window",
    build=lambda c: StreamingAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": True,
        "window": WINDOW,
        "sink_tokens": SINKS,
        "positions": "none",
        "padding_side": "right",
        "bias": False,
    },
)
