"""Whisper's text decoder on a small encoder: one dict of keys and values for all attentions, as in OpenAI's code."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoids(start, length, channels, like):
    steps = torch.arange(0, channels, 2, dtype=torch.float64, device=like.device) / channels
    angles = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None] * 10000.0**-steps
    return torch.cat([angles.sin(), angles.cos()], -1).to(like.dtype)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.value = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)
        self.key, self.out = nn.Linear(n_state, n_state, bias=False), nn.Linear(n_state, n_state)

    def keys_values(self, x):
        return self.key(x), self.value(x)

    def forward(self, x, keys_values, allowed):
        q, k, v = (z.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for z in (self.query(x), *keys_values))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, n_state, n_head, n_mlp, cross_attention=False):
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn = MultiHeadAttention(n_state, n_head) if cross_attention else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross_attention else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def forward(self, x, allowed, store=None, memory_allowed=None):
        h = self.attn_ln(x)
        k, v = self.attn.keys_values(h)
        if store is not None:
            if self.attn in store:
                k, v = torch.cat([store[self.attn][0], k], 1), torch.cat([store[self.attn][1], v], 1)
            store[self.attn] = k, v
        x = x + self.attn(h, (k, v), allowed)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), store[self.cross_attn], memory_allowed)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, c, first_entry):
        super().__init__()
        if c.d_model % 2:
            raise ValueError("sinusoids need an even n_state")
        self.first_entry = first_entry
        self.source_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        sizes = c.d_model, c.num_heads, c.d_ff
        self.encoder = nn.ModuleList([ResidualAttentionBlock(*sizes) for _ in range(c.num_layers)])
        self.decoder = nn.ModuleList([ResidualAttentionBlock(*sizes, True) for _ in range(c.num_layers)])
        self.ln_post, self.ln = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def begin(self, source, source_mask=None):
        """Encode, and make keys and values of the source for all layers at once: the store that decoding starts from."""
        mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask.bool()
        x = self.source_embedding(source)
        x = x + sinusoids(0, source.shape[1], x.shape[-1], x)
        for block in self.encoder:
            x = block(x, mask[:, None])
        memory = self.ln_post(x)
        return {block.cross_attn: block.cross_attn.keys_values(memory) for block in self.decoder}, mask[:, None]

    def decode(self, tokens, store, memory_allowed, target_mask=None):
        mine = store.get(self.decoder[0].attn)
        past = 0 if mine is None else mine[0].shape[1]
        offset = next(iter(store.values()))[0].shape[1] if past and self.first_entry else past
        length = tokens.shape[1]
        x = self.token_embedding(tokens)
        x = x + sinusoids(offset, length, x.shape[-1], x)
        seen = torch.ones(past + length, past + length, dtype=torch.bool, device=tokens.device).tril()
        allowed = seen[past:][None]
        if target_mask is not None:
            eye = torch.eye(length, dtype=torch.bool, device=tokens.device)
            allowed = (allowed & target_mask.bool()[:, None]) | eye
        for block in self.decoder:
            x = block(x, allowed, store, memory_allowed)
        return F.linear(self.ln(x), self.token_embedding.weight)

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, *self.begin(source, source_mask), target_mask)


def stepwise(model, source, chunks):
    store, memory_allowed = model.begin(source)
    return torch.cat([model.decode(chunk, store, memory_allowed) for chunk in chunks], 1)


def subject(name, first_entry):
    return Subject(
        kind="encoder_decoder",
        name=name,
        build=lambda c: Whisper(c, first_entry),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
        cache=stepwise,
        declares={"positions": "sinusoidal", "layout": "halves", "norm_placement": "pre", "norm": "layer",
                  "activation": "gelu", "padding_side": "right"},
    )


right = subject("small whisper", False)
wrong = subject("small whisper, first entry", True)

WHAT = "The position of a decoded chunk is read off the first entry of the key-value dict, which is a cross-attention's since these are filled in beforehand."
CAUSE = (
    "In cached decoding the offset of the positions is the length of the source (the first cached tensor is the cross-attention's) "
    "rather than the number of target tokens decoded so far; the uncached forward is right."
)
