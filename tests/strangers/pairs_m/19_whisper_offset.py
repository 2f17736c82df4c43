"""zoo/PR 251: Whisper's text decoder over tokens as source. The cache is one dict from projection to tensor; keys and
values of the audio side are computed once, before the first step."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The number of tokens that are decoded already is read off the first entry of the cache, which holds memory keys."
CAUSE = (
    "offset = length of the first tensor in the cache; since cross-attention keys are put in first it is the length of "
    "the source, not of the past target, so with a cache the positions of the target begin at the wrong index."
)


def sinusoids(start, length, width, like):
    """Positions start .. start + length - 1, sines and cosines interleaved."""
    step = torch.arange(start, start + length, dtype=torch.float64, device=like.device)
    channel = torch.arange(width, device=like.device)
    angle = step[:, None] / 10000.0 ** ((channel - channel % 2).double() / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)


class Attention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query, self.value = nn.Linear(n_state, n_state), nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.out = nn.Linear(n_state, n_state)

    def attend(self, x, k, v, causal):
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in (self.query(x), k, v))
        qk = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        if causal:
            seen = torch.ones(qk.shape[-2:], dtype=torch.bool, device=x.device).tril(qk.size(-1) - qk.size(-2))
            qk = qk.masked_fill(~seen, float("-inf"))
        return self.out((qk.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, n_state, n_head, n_mlp, cross):
        super().__init__()
        self.attn, self.attn_ln = Attention(n_state, n_head), nn.LayerNorm(n_state)
        self.cross_attn = Attention(n_state, n_head) if cross else None
        self.cross_attn_ln = nn.LayerNorm(n_state) if cross else None
        self.mlp = nn.Sequential(nn.Linear(n_state, n_mlp), nn.GELU(), nn.Linear(n_mlp, n_state))
        self.mlp_ln = nn.LayerNorm(n_state)

    def prefill(self, memory, kv):
        for linear in (self.cross_attn.key, self.cross_attn.value):
            kv[linear] = linear(memory)

    def grown(self, linear, h, kv):
        if kv is None:
            return linear(h)
        kv[linear] = torch.cat([kv[linear], linear(h)], 1) if linear in kv else linear(h)
        return kv[linear]

    def forward(self, x, memory=None, kv=None):
        h = self.attn_ln(x)
        k, v = self.grown(self.attn.key, h, kv), self.grown(self.attn.value, h, kv)
        x = x + self.attn.attend(h, k, v, causal=self.cross_attn is not None)
        if self.cross_attn is not None:
            c = self.cross_attn
            k, v = (c.key(memory), c.value(memory)) if kv is None else (kv[c.key], kv[c.value])
            x = x + c.attend(self.cross_attn_ln(x), k, v, causal=False)
        return x + self.mlp(self.mlp_ln(x))


class Whisper(nn.Module):
    def __init__(self, n_vocab, n_state, n_head, n_mlp, n_layer):
        super().__init__()
        self.source_embedding = nn.Embedding(n_vocab, n_state)
        self.token_embedding = nn.Embedding(n_vocab, n_state)
        self.encoder = nn.ModuleList([Residual(n_state, n_head, n_mlp, False) for _ in range(n_layer)])
        self.decoder = nn.ModuleList([Residual(n_state, n_head, n_mlp, True) for _ in range(n_layer)])
        self.ln_post, self.ln = nn.LayerNorm(n_state), nn.LayerNorm(n_state)

    def embed_audio(self, source):
        x = self.source_embedding(source)
        x = x + sinusoids(0, x.size(1), x.size(2), x)
        for block in self.encoder:
            x = block(x)
        return self.ln_post(x)

    def offset(self, kv):
        own = self.decoder[0].attn.key
        return kv[own].size(1) if own in kv else 0

    def logits(self, tokens, memory, kv=None):
        start = 0 if kv is None else self.offset(kv)
        x = self.token_embedding(tokens)
        x = x + sinusoids(start, x.size(1), x.size(2), x)
        for block in self.decoder:
            x = block(x, memory, kv)
        return self.ln(x) @ self.token_embedding.weight.T

    def forward(self, source, target):
        return self.logits(target, self.embed_audio(source))

    def decode(self, source, chunks):
        memory, kv = self.embed_audio(source), {}
        for block in self.decoder:
            block.prefill(memory, kv)
        return torch.cat([self.logits(chunk, memory, kv) for chunk in chunks], 1)


class WhisperFirstEntry(Whisper):
    def offset(self, kv):
        return next(iter(kv.values())).size(1) if kv else 0


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
        forward=lambda m, source, target: m(source, target),
        cache=lambda m, source, chunks: m.decode(source, chunks),
        declares={"positions": "sinusoidal", "layout": "interleaved", "tied": True, "norm_placement": "pre",
                  "activation": "gelu"},
    )  # fmt: skip


right, wrong = subject(Whisper), subject(WhisperFirstEntry)
