"""Like Whisper, of audio codes: two convolutions (the second halves the length) before an encoder, a decoder over text."""
import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject


def sinusoids(length, channels, max_timescale=10000):
    assert channels % 2 == 0
    half = channels // 2
    inv = torch.exp(-math.log(max_timescale) / max(half - 1, 1) * torch.arange(half, dtype=torch.float64))
    scaled = torch.arange(length, dtype=torch.float64)[:, None] * inv[None, :]
    return torch.cat([scaled.sin(), scaled.cos()], dim=1)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state: int, n_head: int):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Optional[Tensor], hide: Tensor):
        q = self.query(x)
        source = x if xa is None else xa
        k, v = self.key(source), self.value(source)
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = (q @ k).masked_fill(hide, torch.finfo(q.dtype).min)
        return self.out((F.softmax(qk, dim=-1) @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state: int, n_head: int, n_mlp: int, cross_attention: bool = False):
        super().__init__()
        self.attn = MultiHeadAttention(n_state, n_head)
        self.attn_ln = nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, hide, xa=None, hide_xa=None):
        x = x + self.attn(self.attn_ln(x), None, hide)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, hide_xa)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, n_codes, n_state, n_head, n_layer, n_mlp):
        super().__init__()
        self.codes = nn.Embedding(n_codes, n_state)
        self.conv1 = nn.Conv1d(n_state, n_state, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(n_state, n_state, kernel_size=3, stride=2, padding=1)
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, n_mlp) for _ in range(n_layer)])
        self.ln_post = nn.LayerNorm(n_state)

    def forward(self, codes: Tensor, mask: Tensor):
        x = self.codes(codes).transpose(1, 2)
        keep = mask[:, None, :].to(x.dtype)
        x = x * keep
        x = F.gelu(self.conv1(x))
        x = x * keep
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        mask = mask[:, ::2]
        x = x + sinusoids(x.shape[1], x.shape[2]).to(x)
        for block in self.blocks:
            x = block(x, ~mask[:, None, None, :])
        return self.ln_post(x), mask


class TextDecoder(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_state, n_head, n_layer, n_mlp):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(torch.randn(n_ctx, n_state) * 0.1)
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, n_mlp, True) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_state)

    def forward(self, tokens, mask, xa, mask_xa):
        n = tokens.shape[1]
        if n > len(self.positional_embedding):
            raise ValueError("longer than the context")
        x = self.token_embedding(tokens) + self.positional_embedding[:n]
        hide = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1) | ~mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, hide, xa, ~mask_xa[:, None, None, :])
        return self.ln(x) @ self.token_embedding.weight.T


class Whisper(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.encoder = AudioEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff)
        self.decoder = TextDecoder(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff)

    def forward(self, codes, tokens, codes_mask=None, tokens_mask=None):
        codes_mask = torch.ones_like(codes, dtype=torch.bool) if codes_mask is None else codes_mask
        tokens_mask = torch.ones_like(tokens, dtype=torch.bool) if tokens_mask is None else tokens_mask
        xa, mask_xa = self.encoder(codes, codes_mask)
        return self.decoder(tokens, tokens_mask, xa, mask_xa)


subject = Subject(
    kind="encoder_decoder",
    name="Whisper-like",
    build=Whisper,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu", "output_bias": False,
        "structure": "other", "padding_side": "right",
    },
)
