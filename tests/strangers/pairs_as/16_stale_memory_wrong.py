WHAT = 'keys and values of the encoded source are kept in the cross-attention between calls of generate and never dropped: a second source of the same shape is translated as the first (missing before line 106).'
"""fairseq-like encoder-decoder; the cross-attention keeps its keys and values while it generates."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject

BOS = 1


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.static_kv = None

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, allowed, static=False):
        q = self.split(self.q_proj(query))
        if static and self.static_kv is not None and self.static_kv[0].shape[::2] == key.shape[:2]:
            k, v = self.static_kv
        else:
            k, v = self.split(self.k_proj(key)), self.split(self.v_proj(key))
        if static:
            self.static_kv = (k, v)
        s = torch.matmul(q, k.transpose(2, 3)) * self.head_dim ** -0.5
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        p = F.softmax(s, dim=-1).masked_fill(~allowed, 0.0)
        return self.out_proj(torch.matmul(p, v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d, f):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.self_attn, self.ffn = MultiheadAttention(d, h), FeedForward(d, f)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, allowed):
        x = self.ln1(x + self.self_attn(x, x, allowed))
        return self.ln2(x + self.ffn(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.self_attn, self.encoder_attn, self.ffn = MultiheadAttention(d, h), MultiheadAttention(d, h), FeedForward(d, f)
        self.ln1, self.ln2, self.ln3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, y, memory, allowed, memory_allowed, static):
        y = self.ln1(y + self.self_attn(y, y, allowed))
        y = self.ln2(y + self.encoder_attn(y, memory, memory_allowed, static))
        return self.ln3(y + self.ffn(y))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.src, self.tgt = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.src_pos, self.tgt_pos = nn.Embedding(c.max_len, d), nn.Embedding(c.max_len, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.output_projection = nn.Linear(d, c.vocab_size, bias=False)

    def encode(self, source, source_mask):
        x = self.src(source) + self.src_pos.weight[:source.size(1)]
        for layer in self.encoder:
            x = layer(x, source_mask[:, None, None, :])
        return x

    def decode(self, target, memory, source_mask, target_mask=None, static=False):
        T = target.size(1)
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        y = self.tgt(target) + self.tgt_pos.weight[:T]
        for layer in self.decoder:
            y = layer(y, memory, allowed, source_mask[:, None, None, :], static)
        return self.output_projection(y)

    def forward(self, source, target, source_mask=None, target_mask=None):
        if source_mask is None:
            source_mask = torch.ones_like(source, dtype=torch.bool)
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)

    def reset_static(self):
        for layer in self.decoder:
            layer.encoder_attn.static_kv = None

    @torch.no_grad()
    def generate(self, source, steps, use_cache):
        source_mask = torch.ones_like(source, dtype=torch.bool)
        memory = self.encode(source, source_mask)
        out = source.new_full((source.size(0), 1), BOS)
        for _ in range(steps):
            logits = self.decode(out, memory, source_mask, static=use_cache)
            out = torch.cat([out, logits[:, -1:].argmax(-1)], 1)
        return out


subject = Subject(
    kind="encoder_decoder",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
              "residual": True, "activation": "relu", "bias": True, "output_bias": False, "tied": False,
              "padding_side": "right"},
)
