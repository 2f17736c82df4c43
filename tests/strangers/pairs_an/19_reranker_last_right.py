"""A reranker on a decoder: query and passage in one sequence, the state of the last real token is scored."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Layer(nn.Module):
    def __init__(self, dim, n_q, n_kv, inner):
        super().__init__()
        self.hd = dim // n_q
        self.n_q, self.n_kv = n_q, n_kv
        self.attn_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.wqkv = nn.Linear(dim, (n_q + 2 * n_kv) * self.hd, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w13 = nn.Linear(dim, 2 * inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)

    def forward(self, x, cos, sin, visible):
        B, T, D = x.shape
        q, k, v = self.wqkv(self.attn_norm(x)).view(B, T, -1, self.hd).transpose(1, 2).split([self.n_q, self.n_kv, self.n_kv], 1)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        k, v = (t[:, :, None].expand(-1, -1, self.n_q // self.n_kv, -1, -1).flatten(1, 2) for t in (k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        x = x + self.wo(o.transpose(1, 2).reshape(B, T, D))
        gate, up = self.w13(self.ffn_norm(x)).chunk(2, -1)
        return x + self.w2(F.silu(gate) * up)


class Reranker(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hd = c.d_model // c.num_heads
        if self.hd % 2:
            raise ValueError("head width must be even")
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            Layer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.score = nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, input_ids, attention_mask=None):
        B, T = input_ids.shape
        device = input_ids.device
        if attention_mask is None:
            attention_mask = torch.ones(B, T, dtype=torch.bool, device=device)
        visible = torch.ones(T, T, dtype=torch.bool, device=device).tril() & attention_mask[:, None, None, :]
        # a padded query sees itself, so that no row is empty
        visible = visible | torch.eye(T, dtype=torch.bool, device=device)
        x = self.embed(input_ids)
        rate = 10000.0 ** (-torch.arange(0, self.hd, 2, dtype=torch.float64, device=device) / self.hd)
        angle = torch.arange(T, dtype=torch.float64, device=device)[:, None] * rate
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, visible)
        x = self.norm(x)
        last = (attention_mask.long() * torch.arange(T, device=device)).argmax(dim=1)
        return self.score(x[torch.arange(B, device=device), last])


subject = Subject(
    kind="classifier",
    name="reranker, last token",
    build=Reranker,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "last", "padding_side": "both", "positions": "rotary", "layout": "halves", "norm": "rms",
        "norm_placement": "pre", "final_norm": True, "activation": "swiglu", "bias": False, "output_bias": False,
        "grouped_queries": True,
    },
)
