WHAT = "where a head has an odd width the channel that is not rotated is taken from the front, not from the end: channel 0 stands there twice and the last one is lost (line 18)"
# An encoder with rotary positions that takes heads of any width: an odd channel passes through unrotated.
import torch
import torch.nn as nn

from veriformer.properties import Subject


class Rotary(nn.Module):
    def forward(self, x):
        """x [B, T, H, K]"""
        width = x.size(-1)
        half = width // 2
        rest = width - 2 * half
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / max(half, 1))
        angle = torch.arange(x.size(1), dtype=torch.float64, device=x.device)[:, None, None] * frequency
        cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        first, second, through = x[..., :half], x[..., half : 2 * half], x[..., :rest]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, through], dim=-1)


class MultiHead(nn.Module):
    def __init__(self, model_dim, heads):
        super().__init__()
        self.heads = heads
        self.w_query = nn.Linear(model_dim, model_dim)
        self.w_key = nn.Linear(model_dim, model_dim)
        self.w_value = nn.Linear(model_dim, model_dim)
        self.w_out = nn.Linear(model_dim, model_dim)
        self.rotary = Rotary()

    def forward(self, x, pad):
        q = self.rotary(self.w_query(x).unflatten(-1, (self.heads, -1)))
        k = self.rotary(self.w_key(x).unflatten(-1, (self.heads, -1)))
        v = self.w_value(x).unflatten(-1, (self.heads, -1))
        scores = torch.einsum("bthk,bshk->bhts", q, k) / q.size(-1) ** 0.5
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :], float("-inf"))
        mixed = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v)
        return self.w_out(mixed.flatten(2))


class Sublayer(nn.Module):
    """Post-LN: norm(x + f(x))."""

    def __init__(self, model_dim, function):
        super().__init__()
        self.function, self.norm = function, nn.LayerNorm(model_dim)

    def forward(self, x, *rest):
        return self.norm(x + self.function(x, *rest))


class RoFormer(nn.Module):
    def __init__(self, vocab, model_dim, heads, inner, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocab, model_dim)
        self.embedding_norm = nn.LayerNorm(model_dim)
        self.attentions = nn.ModuleList(Sublayer(model_dim, MultiHead(model_dim, heads)) for _ in range(layers))
        self.networks = nn.ModuleList(
            Sublayer(
                model_dim, nn.Sequential(nn.Linear(model_dim, inner), nn.GELU(), nn.Linear(inner, model_dim))
            )
            for _ in range(layers)
        )

    def forward(self, tokens, pad=None):
        x = self.embedding_norm(self.embedding(tokens))
        for attention, network in zip(self.attentions, self.networks):
            x = network(attention(x, pad))
        return x


subject = Subject(
    kind="encoder",
    name="RoFormer",
    build=lambda c: RoFormer(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens, attention_mask=None: m(tokens, None if attention_mask is None else ~attention_mask),
    declares={"causal": False, "positions": "rotary", "norm_placement": "post", "activation": "gelu"},
)
