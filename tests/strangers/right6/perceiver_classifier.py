"""Perceiver: a few latents read the tokens again and again, then think; classes from their mean."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class PreNorm(nn.Module):
    def __init__(self, dim, fn, context=False):
        super().__init__()
        self.fn, self.norm = fn, nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(dim) if context else None

    def forward(self, x, context=None, **kwargs):
        x = self.norm(x)
        if self.norm_context is not None:
            kwargs["context"] = self.norm_context(context)
        return self.fn(x, **kwargs)


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (z.view(z.shape[0], z.shape[1], self.heads, -1).transpose(1, 2) for z in (q, k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


def feed_forward(dim, hidden):
    return nn.Sequential(nn.Linear(dim, 2 * hidden), GEGLU(), nn.Linear(hidden, dim))


class Perceiver(nn.Module):
    def __init__(self, c, latents=5):
        super().__init__()
        d = c.d_model
        self.tokens, self.places = nn.Embedding(c.vocab_size, d), nn.Embedding(c.max_len, d)
        self.latents = nn.Parameter(torch.randn(latents, d))
        self.layers = nn.ModuleList()
        for _ in range(c.num_layers):
            self.layers.append(
                nn.ModuleList(
                    [
                        PreNorm(d, Attention(d, c.num_heads), context=True),
                        PreNorm(d, feed_forward(d, c.d_ff)),
                        PreNorm(d, Attention(d, c.num_heads)),
                        PreNorm(d, feed_forward(d, c.d_ff)),
                    ]
                )
            )
        self.to_logits = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, c.num_classes))

    def forward(self, data, mask=None):
        data = self.tokens(data) + self.places(torch.arange(data.shape[1], device=data.device))
        x = self.latents.expand(data.shape[0], -1, -1)
        for cross_attn, cross_ff, self_attn, self_ff in self.layers:
            x = cross_attn(x, context=data, mask=mask) + x
            x = cross_ff(x) + x
            x = self_attn(x) + x
            x = self_ff(x) + x
        return self.to_logits(x.mean(dim=1))


def forward(model, tokens, attention_mask=None):
    return model(tokens, None if attention_mask is None else attention_mask.bool())


declared = Subject(
    kind="classifier", name="Perceiver", build=Perceiver, forward=forward,
    declares={
        "positions": "learned", "pooling": "other", "norm": "layer", "norm_placement": "pre", "residual": True,
        "activation": "other", "output_bias": True, "padding_side": "right", "beyond_max_len": "error",
        "attention_scale": "1/sqrt(d_head)", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="classifier", build=Perceiver, forward=forward)
