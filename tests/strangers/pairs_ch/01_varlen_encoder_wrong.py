"""Unpadded encoder: padding is dropped before the first layer, all samples run as one stream of real tokens."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class StreamLayer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wqkv, self.wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, same):
        n, width = x.shape
        q, k, v = self.wqkv(self.norm1(x)).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.wo(out.transpose(0, 1).reshape(n, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VarlenEncoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, max_len):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(StreamLayer(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids, mask=None):
        batch, length = ids.shape
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        real = mask.flatten().nonzero().squeeze(1)
        place = (mask.long().cumsum(1) - 1).flatten()[real]
        x = self.tokens(ids.flatten()[real]) + self.places(place)

        ends = mask.sum(1).cumsum(0)  # cu_seqlens without its zero
        sample = torch.bucketize(torch.arange(real.numel(), device=ids.device), ends)
        same = sample[:, None] == sample[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.norm(x)
        return x.new_zeros(batch * length, x.shape[-1]).index_copy(0, real, x).view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="varlen encoder",
    build=lambda c: VarlenEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "padding_side": "both"},
)

WHAT = 'bucketize without right=True puts a token whose index equals an end into the sample before: the first token of every sample but the first attends with the sample before it, and not with its own (line 40).'
