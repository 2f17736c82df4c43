WHAT = "Precedence: `keep & causal | in_prefix` is `(keep & causal) | in_prefix`, so that the padding mask is not applied within the prefix block: padding whose position counts as below PREFIX (all on the left, and behind short samples) is seen by the prefix (line 64: `return keep[:, None, :] & causal | in_prefix`)."
"""A prefix language model (GLM-like): the first tokens see one another both ways, what follows is causal."""
import torch
import torch.nn as nn

from veriformer.properties import Subject

PREFIX = 3


def rotate(x, positions):
    """x [B, H, T, K], positions [B, T]."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = (positions[:, None, :, None] * rates)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class PrefixLayer(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("rotary needs heads of even width")
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.dense = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))

    def forward(self, hidden, positions, seen):
        states = self.attention_norm(hidden)
        q, k, v = (f(states).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = rotate(q, positions), rotate(k, positions)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min)
        context = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        hidden = hidden + self.dense(context)
        return hidden + self.mlp(self.mlp_norm(hidden))


class PrefixLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([PrefixLayer(dim, heads, inner) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, attention_mask=None):
        keep = torch.ones_like(tokens).bool() if attention_mask is None else attention_mask.bool()
        positions = keep.long().cumsum(1) - 1  # of real tokens, wherever the padding lies
        seen = self.visible(keep, positions)
        hidden = self.embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden, positions, seen)
        return self.lm_head(self.norm(hidden))

    @staticmethod
    def visible(keep, positions):
        length = keep.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=keep.device).tril()[None]
        in_prefix = (positions < PREFIX)[:, :, None] & (positions < PREFIX)[:, None, :]
        return keep[:, None, :] & causal | in_prefix


subject = Subject(
    kind="decoder",
    name="prefix LM",
    build=lambda c: PrefixLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"prefix": PREFIX, "positions": "rotary", "layout": "halves", "norm": "layer", "norm_placement": "pre",
              "activation": "gelu", "padding_side": "both"},
)
