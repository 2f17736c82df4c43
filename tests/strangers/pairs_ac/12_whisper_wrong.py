WHAT = "The projected keys and values of the cross attention are not reset between sequences: cached decoding of another source of the same shape goes on with those of the one before (behind line 100)."
"""Whisper over discrete speech units, after openai/whisper: pre-LN, keys without bias, tied output, kv cache."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

SOT = 1


def sinusoids(length, channels, max_timescale=10000):
    increment = math.log(max_timescale) / max(channels // 2 - 1, 1)
    inv_timescales = torch.exp(-increment * torch.arange(channels // 2, dtype=torch.float64))
    scaled = torch.arange(length, dtype=torch.float64)[:, None] * inv_timescales[None]
    return torch.cat([scaled.sin(), scaled.cos()], dim=1).float()


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)
        self.kept = None

    def reset(self):
        self.kept = None

    def heads(self, x):
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def forward(self, x, xa=None, visible=None, use_cache=False):
        q = self.heads(self.query(x))
        if xa is None:
            k, v = self.heads(self.key(x)), self.heads(self.value(x))
            if use_cache:
                if self.kept is not None:
                    k, v = torch.cat([self.kept[0], k], dim=2), torch.cat([self.kept[1], v], dim=2)
                self.kept = k, v
        elif not use_cache:
            k, v = self.heads(self.key(xa)), self.heads(self.value(xa))
        else:  # projected once; serves all steps that follow
            if self.kept is None or self.kept[0].shape[::2] != xa.shape[:2]:
                self.kept = self.heads(self.key(xa)), self.heads(self.value(xa))
            k, v = self.kept
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, n_mlp, cross_attention=False):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, xa=None, visible=None, xa_visible=None, use_cache=False):
        x = x + self.attn(self.attn_ln(x), visible=visible, use_cache=use_cache)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, xa_visible, use_cache)
        return x + self.mlp(self.mlp_ln(x))


class AudioEncoder(nn.Module):
    def __init__(self, n_units, n_ctx, n_state, n_head, n_layer, n_mlp):
        super().__init__()
        self.unit_embedding = nn.Embedding(n_units, n_state)
        self.register_buffer("positional_embedding", sinusoids(n_ctx, n_state))
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, n_mlp) for _ in range(n_layer)])
        self.ln_post = nn.LayerNorm(n_state)

    def forward(self, units, visible=None):
        x = self.unit_embedding(units)
        x = x + self.positional_embedding[: x.shape[1]].to(x.dtype)
        for block in self.blocks:
            x = block(x, visible=visible)
        return self.ln_post(x)


class TextDecoder(nn.Module):
    def __init__(self, n_vocab, n_ctx, n_state, n_head, n_layer, n_mlp):
        super().__init__()
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.positional_embedding = nn.Parameter(torch.randn(n_ctx, n_state) * 0.1)
        self.blocks = nn.ModuleList([ResidualAttentionBlock(n_state, n_head, n_mlp, True) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_state)

    def reset_cache(self):
        for block in self.blocks:
            block.attn.reset()

    def forward(self, tokens, xa, xa_visible=None, keep=None, use_cache=False):
        kept = self.blocks[0].attn.kept
        offset = kept[0].shape[2] if use_cache and kept is not None else 0
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.positional_embedding[offset : offset + length]
        visible = torch.ones(length, offset + length, dtype=torch.bool, device=x.device).tril(offset)
        if keep is not None:
            visible = visible & keep[:, None, None, :]
        for block in self.blocks:
            x = block(x, xa, visible, xa_visible, use_cache)
        return self.ln(x) @ self.token_embedding.weight.transpose(0, 1)


class Whisper(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_model % 2:
            raise ValueError("sinusoids need an even width")
        self.encoder = AudioEncoder(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff)
        self.decoder = TextDecoder(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff)

    def forward(self, source, target, source_mask=None, target_mask=None):
        visible = None if source_mask is None else source_mask[:, None, None, :]
        return self.decoder(target, self.encoder(source, visible), visible, target_mask)

    @torch.no_grad()
    def decode_chunks(self, source, chunks):
        xa = self.encoder(source)
        self.decoder.reset_cache()
        outputs = [self.decoder(chunk, xa, use_cache=True) for chunk in chunks]
        return torch.cat(outputs, dim=1)

    @torch.no_grad()
    def transcribe(self, source, steps, use_cache):
        xa = self.encoder(source)
        self.decoder.reset_cache()
        tokens = torch.full_like(source[:, :1], SOT)
        for _ in range(steps):
            logits = self.decoder(tokens[:, -1:] if use_cache else tokens, xa, use_cache=use_cache)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=-1)], dim=1)
        return tokens


subject = Subject(
    kind="encoder_decoder",
    name="Whisper",
    build=Whisper,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.decode_chunks(source, chunks),
    generate=lambda m, source, steps, use_cache: m.transcribe(source, steps, use_cache),
    declares={
        "causal": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "tied": True,
        "output_bias": False,
        "structure": "other",
        "padding_side": "right",
    },
)
