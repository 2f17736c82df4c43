"""ESM-2-like protein encoder: rotary attention, token dropout rescaling of the embeddings."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

MASK_IDX = 2
MASK_RATIO_TRAIN = 0.15 * 0.8


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class EsmAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        if self.head_dim % 2:
            raise ValueError("head width must be even")
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        inv = 1.0 / (10000 ** (torch.arange(0, self.head_dim, 2).double() / self.head_dim))
        self.register_buffer("inv_freq", inv, persistent=False)

    def forward(self, x, pad):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.heads, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        t = torch.arange(T, device=x.device, dtype=self.inv_freq.dtype)
        angles = torch.outer(t, self.inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        w = torch.einsum("bhqd,bhkd->bhqk", q * self.head_dim**-0.5, k)
        w = w.masked_fill(pad[:, None, None], torch.finfo(w.dtype).min).softmax(-1)
        return self.out_proj(torch.einsum("bhqk,bhkd->bqhd", w, v).reshape(B, T, D))


class EsmLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn = EsmAttention(dim, heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x, pad):
        x = x + self.self_attn(self.self_attn_layer_norm(x), pad)
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class Esm(nn.Module):
    def __init__(self, alphabet, dim, heads, layers, ffn):
        super().__init__()
        self.embed_tokens = nn.Embedding(alphabet, dim)
        self.layers = nn.ModuleList([EsmLayer(dim, heads, ffn) for _ in range(layers)])
        self.emb_layer_norm_after = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        masked = (tokens == MASK_IDX) & attention_mask
        x = self.embed_tokens(tokens).masked_fill(masked[..., None], 0.0)
        src_lengths = attention_mask.sum(-1).clamp(min=1)
        observed = masked.sum(-1).to(x.dtype) / src_lengths
        x = x * ((1 - MASK_RATIO_TRAIN) / (1 - observed).clamp(min=1e-3))[:, None, None]
        for layer in self.layers:
            x = layer(x, ~attention_mask)
        return self.emb_layer_norm_after(x)


subject = Subject(
    kind="encoder",
    name="ESM",
    build=lambda c: Esm(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "padding_side": "both", "structure": "other"},
)
