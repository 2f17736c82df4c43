"""ModernBERT: padding is taken out, all sequences run as one packed stream, and the outputs are put back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(mask):
    """Indices of real tokens in the flattened batch, and where each sequence begins in the packed stream."""
    lengths = mask.sum(dim=-1)
    indices = mask.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    return indices, cu_seqlens


def rope(x, positions, base=10000.0):
    """x [N, H, K], positions [N]; pairs of neighbouring channels."""
    half = x.shape[-1] // 2
    freqs = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None] * freqs
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.Wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, positions, same):
        q, k, v = self.Wqkv(x).view(x.shape[0], 3, self.heads, -1).unbind(1)
        q, k = rope(q, positions), rope(k, positions)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        probs = scores.masked_fill(~same, float("-inf")).softmax(-1)
        return self.Wo(torch.einsum("hqk,khd->qhd", probs, v).flatten(1))


class Layer(nn.Module):
    def __init__(self, dim, heads, d_ff):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.attn = Attention(dim, heads)
        self.Wi, self.Wo = nn.Linear(dim, d_ff, bias=False), nn.Linear(d_ff, dim, bias=False)

    def forward(self, x, positions, same):
        x = x + self.attn(self.attn_norm(x), positions, same)
        return x + self.Wo(F.gelu(self.Wi(self.mlp_norm(x))))


class ModernBert(nn.Module):
    def __init__(self, vocab, dim, heads, layers, d_ff):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, d_ff) for _ in range(layers)])
        self.final_norm = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        indices, cu_seqlens = unpad(attention_mask)
        positions = indices % length
        stream = torch.arange(len(indices), device=tokens.device)
        segment = torch.bucketize(stream, cu_seqlens[1:], right=True)
        same = segment[:, None] == segment[None, :]
        x = self.tok_embeddings(tokens.flatten()[indices])
        for layer in self.layers:
            x = layer(x, positions, same)
        x = self.final_norm(x)
        return x.new_zeros(batch * length, x.shape[-1]).index_copy(0, indices, x).view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="modernbert",
    build=lambda c: ModernBert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "layer",
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "padding_side": "both",
    },
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
)
