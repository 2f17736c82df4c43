WHAT = "the packed path sorts samples by length and unsorts the result with the order itself (states[order]) in place of its inverse: three or more samples come back in each other's rows"
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class PackedLayer(nn.Module):
    def __init__(self, dim, heads, ff):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, ff), nn.Linear(ff, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, flat, lengths):
        N, D = flat.shape
        q, k, v = self.in_proj(flat).view(N, 3, self.heads, D // self.heads).permute(1, 2, 0, 3)
        pieces = [F.scaled_dot_product_attention(a, b, c) for a, b, c in
                  zip(q.split(lengths, 1), k.split(lengths, 1), v.split(lengths, 1))]
        flat = self.norm1(flat + self.out_proj(torch.cat(pieces, 1).transpose(0, 1).reshape(N, D)))
        return self.norm2(flat + self.fc2(F.gelu(self.fc1(flat))))


class PackedEncoder(nn.Module):
    """Padding is taken out once, in front of the layers, and put back behind them."""

    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(PackedLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, ids, mask=None):
        B, T = ids.shape
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        order = mask.sum(1).argsort(descending=True, stable=True)  # longest first
        ids, mask = ids[order], mask[order]
        lengths = mask.sum(1).tolist()
        place = torch.arange(T, device=ids.device).expand(B, T)
        flat = self.tokens(ids[mask]) + self.positions(place[mask])
        for layer in self.layers:
            flat = layer(flat, lengths)
        states = flat.new_zeros(B, T, flat.shape[-1])
        states[mask] = flat
        return states[order]


subject = Subject(kind="encoder", build=PackedEncoder, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                  declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu", "padding_side": "right"})
