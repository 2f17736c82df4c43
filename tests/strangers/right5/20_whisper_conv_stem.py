WHAT = "Whisper: a stem of two convolutions before the encoder (padding zeroed before each), sines and cosines in halves for the source, learned rows for the target, scale split as d ** -0.25 on queries and keys, keys without bias"
import math

import torch
from torch import nn
from torch.nn import functional as F


def sinusoids(length, channels, device):
    half = channels // 2
    step = math.log(10000) / max(half - 1, 1)
    t = torch.arange(length, dtype=torch.float64, device=device)[:, None]
    a = t * torch.exp(-step * torch.arange(half, dtype=torch.float64, device=device))
    return F.pad(torch.cat([a.sin(), a.cos()], 1), (0, channels - 2 * half))


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n_head = h
        self.query, self.key, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d, bias=False), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, xa=None, mask=None):
        y = x if xa is None else xa
        q, k, v = self.query(x), self.key(y), self.value(y)
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk.masked_fill(~mask, torch.finfo(qk.dtype).min)
        w = F.softmax(qk.to(torch.promote_types(qk.dtype, torch.float32)), dim=-1).to(q.dtype)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class Block(nn.Module):
    def __init__(self, d, h, ff, cross):
        super().__init__()
        self.attn, self.attn_ln = Attention(d, h), nn.LayerNorm(d)
        self.cross_attn, self.cross_attn_ln = (Attention(d, h), nn.LayerNorm(d)) if cross else (None, None)
        self.mlp, self.mlp_ln = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d)), nn.LayerNorm(d)

    def forward(self, x, mask, xa=None, xa_mask=None):
        x = x + self.attn(self.attn_ln(x), mask=mask)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, xa_mask)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.source = nn.Embedding(vocab, d)
        self.conv1, self.conv2 = nn.Conv1d(d, d, 3, padding=1), nn.Conv1d(d, d, 3, padding=1)
        self.token_embedding, self.positional_embedding = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.encoder = nn.ModuleList(Block(d, h, ff, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(d, h, ff, True) for _ in range(layers))
        self.ln_post, self.ln = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, source, target, source_mask=None, target_mask=None):
        B, S = source.shape
        T = target.shape[1]
        x = self.source(source).transpose(1, 2)
        keep = None if source_mask is None else source_mask[:, None].to(x.dtype)
        for conv in (self.conv1, self.conv2):
            x = F.gelu(conv(x if keep is None else x * keep))
        x = x.transpose(1, 2)
        x = x + sinusoids(S, x.shape[-1], x.device).to(x.dtype)
        seen = None if source_mask is None else source_mask[:, None, None]
        for block in self.encoder:
            x = block(x, seen)
        memory = self.ln_post(x)
        y = self.token_embedding(target) + self.positional_embedding(torch.arange(T, device=target.device))
        past = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            past = past & target_mask[:, None, None]
        for block in self.decoder:
            y = block(y, past, memory, seen)
        return self.ln(y) @ self.token_embedding.weight.transpose(0, 1)


from veriformer.properties import Subject


def build(c):
    return Whisper(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, source_mask, target_mask)


undeclared = Subject(kind="encoder_decoder", build=build, forward=forward)
declared = Subject(
    kind="encoder_decoder", name="whisper", build=build, forward=forward,
    declares={"norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu", "structure": "other",
              "padding_side": "right", "tied": True, "output_bias": False, "beyond_max_len": "error"},
)
