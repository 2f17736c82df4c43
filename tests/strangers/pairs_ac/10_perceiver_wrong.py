WHAT = "The padding mask is repeated head-major, (h b), while queries and keys are folded batch-major, (b h): samples get the masks of others (line 69)."
# Perceiver, after perceiver-pytorch: latents read the tokens by cross attention, then attend to one another.
import torch
from torch import nn, einsum
import torch.nn.functional as F

from veriformer.properties import Subject


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class PreNorm(nn.Module):
    def __init__(self, dim, fn, context_dim=None):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)
        self.norm_context = nn.LayerNorm(context_dim) if exists(context_dim) else None

    def forward(self, x, **kwargs):
        if exists(self.norm_context):
            kwargs.update(context=self.norm_context(kwargs["context"]))
        return self.fn(self.norm(x), **kwargs)


class GEGLU(nn.Module):
    def forward(self, x):
        x, gates = x.chunk(2, dim=-1)
        return x * F.gelu(gates)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden * 2), GEGLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(context_dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def fold(self, t):  # b n (h d) -> (b h) n d
        b, n, _ = t.shape
        return t.reshape(b, n, self.heads, -1).transpose(1, 2).reshape(b * self.heads, n, -1)

    def forward(self, x, context=None, mask=None):
        h, b = self.heads, x.shape[0]
        q = self.to_q(x)
        k, v = self.to_kv(default(context, x)).chunk(2, dim=-1)
        q, k, v = map(self.fold, (q, k, v))
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if exists(mask):
            max_neg_value = -torch.finfo(sim.dtype).max
            mask = mask.repeat(h, 1)[:, None, :]  # b j -> (b h) () j
            sim.masked_fill_(~mask, max_neg_value)
        attn = sim.softmax(dim=-1)
        out = einsum("b i j, b j d -> b i d", attn, v)
        out = out.reshape(b, h, out.shape[1], -1).transpose(1, 2).flatten(2)
        return self.to_out(out)


class Perceiver(nn.Module):
    def __init__(self, *, num_tokens, max_seq_len, dim, depth, heads, ff_hidden, num_classes, num_latents=3):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.latents = nn.Parameter(torch.randn(num_latents, dim))
        dim_head = dim // heads
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    PreNorm(dim, Attention(dim, dim, heads, dim_head), context_dim=dim),
                    PreNorm(dim, FeedForward(dim, ff_hidden)),
                    PreNorm(dim, Attention(dim, None, heads, dim_head)),
                    PreNorm(dim, FeedForward(dim, ff_hidden)),
                ]
            )
            for _ in range(depth)
        )
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, tokens, mask=None):
        b, n = tokens.shape
        data = self.token_emb(tokens) + self.pos_emb(torch.arange(n, device=tokens.device))
        x = self.latents.expand(b, -1, -1)
        for cross_attn, cross_ff, self_attn, self_ff in self.layers:
            x = cross_attn(x, context=data, mask=mask) + x
            x = cross_ff(x) + x
            x = self_attn(x) + x
            x = self_ff(x) + x
        return self.to_logits(x.mean(dim=1))


subject = Subject(
    kind="classifier",
    name="Perceiver",
    build=lambda c: Perceiver(
        num_tokens=c.vocab_size,
        max_seq_len=c.max_len,
        dim=c.d_model,
        depth=c.num_layers,
        heads=c.num_heads,
        ff_hidden=c.d_ff,
        num_classes=c.num_classes,
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "other",
        "norm": "layer",
        "structure": "other",
        "padding_side": "right",
    },
)
