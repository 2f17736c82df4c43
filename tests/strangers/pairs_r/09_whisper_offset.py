"""A Whisper-like encoder-decoder: sinusoids on both sides, keys and values kept in one dict, module -> tensors."""

from functools import partial

import torch
from torch import nn

from veriformer.properties import Subject


def add_sinusoids(x, start):
    rates = 10000.0 ** (-torch.arange(0, x.shape[2], 2, device=x.device) / x.shape[2])
    time = torch.arange(start, start + x.shape[1], device=x.device)[:, None] * rates
    return x + torch.stack([time.sin(), time.cos()], dim=-1).flatten(-2)[:, : x.shape[2]].to(x.dtype)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.value, self.out = (nn.Linear(n_state, n_state) for _ in range(3))
        self.key = nn.Linear(n_state, n_state, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (self.n_head, -1)).transpose(1, 2)

    def keys_values(self, x):
        return self.heads(self.key(x)), self.heads(self.value(x))

    def forward(self, x, k, v, visible):
        scores = self.heads(self.query(x)) @ k.mT / k.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) if visible is None else scores.softmax(-1) * visible
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, n_mlp, cross):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        if cross:
            self.cross_attn, self.cross_attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, visible, cache, xa_visible=None):
        h = self.attn_ln(x)
        k, v = self.attn.keys_values(h)
        if self.attn in cache:
            k, v = (torch.cat(pair, 2) for pair in zip(cache[self.attn], (k, v)))
        cache[self.attn] = k, v
        x = x + self.attn(h, k, v, visible)
        if hasattr(self, "cross_attn"):
            x = x + self.cross_attn(self.cross_attn_ln(x), *cache[self.cross_attn], xa_visible)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        block = partial(ResidualAttentionBlock, c.d_model, c.num_heads, c.d_ff)
        self.encoder, self.decoder = (nn.ModuleList(block(x) for _ in range(c.num_layers)) for x in (False, True))
        self.ln_post, self.ln = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def encode(self, source, source_mask):
        x = add_sinusoids(self.embed(source), 0)
        for block in self.encoder:
            x = block(x, source_mask, {})
        return {block.cross_attn: block.cross_attn.keys_values(self.ln_post(x)) for block in self.decoder}

    def past(self, cache):
        return cache[self.decoder[0].attn][0].shape[2] if self.decoder[0].attn in cache else 0

    offset = past  # of the first new position

    def decode(self, target, cache, source_mask=None, target_mask=None):
        past, length = self.past(cache), target.shape[1]
        x = add_sinusoids(self.embed(target), self.offset(cache))
        visible = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        for block in self.decoder:
            x = block(x, visible if target_mask is None else visible & target_mask, cache, source_mask)
        return self.head(self.ln(x))


class WhisperFirstEntry(Whisper):
    def offset(self, cache):
        return next(iter(cache.values()))[0].shape[2] if len(cache) > len(self.decoder) else 0


def forward(m, source, target, source_mask=None, target_mask=None):
    source_mask, target_mask = (t if t is None else t[:, None, None, :].bool() for t in (source_mask, target_mask))
    return m.decode(target, m.encode(source, source_mask), source_mask, target_mask)


def cached(m, source, chunks):
    cache = m.encode(source, None)
    return torch.cat([m.decode(chunk, cache) for chunk in chunks], 1)


facts = {"positions": "sinusoidal", "norm_placement": "pre", "norm": "layer", "activation": "gelu", "padding_side": "right"}
subject = lambda cls: Subject(kind="encoder_decoder", build=cls, forward=forward, cache=cached, declares=facts)
right, wrong = subject(Whisper), subject(WhisperFirstEntry)
WHAT = "While decoding with the cache the position of a new token is counted by the first entry of the cache, which is a cross-attention's."
CAUSE = (
    "The decoder's offset is the length of the first cached key tensor; since the cross-attention keys are now filled in first, that is the "
    "source's length: every chunk after the first gets the positions S, S+1, .. instead of going on where the target stood."
)
