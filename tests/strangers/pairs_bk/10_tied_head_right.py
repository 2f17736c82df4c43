import torch
from torch import einsum, nn

from veriformer.properties import Subject


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.h, d // self.h).unbind(2)
        sim = einsum("b i h d, b j h d -> b h i j", q, k) * (d // self.h) ** -0.5
        i = torch.arange(n, device=x.device)
        back = (i[:, None] - i[None, :]).to(sim.dtype)
        sim = sim - self.slopes.to(sim.dtype)[:, None, None] * back
        sim = sim.masked_fill(back < 0, -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b j h d -> b i h d", sim.softmax(dim=-1), v)
        return self.to_out(out.reshape(b, n, d))


class AlibiGPT(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.token_emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList(
                    [
                        nn.LayerNorm(dim),
                        AlibiAttention(dim, heads),
                        nn.LayerNorm(dim),
                        nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)),
                    ]
                )
            )
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.token_emb.weight, std=dim ** -0.5)
        self.to_logits.weight = self.token_emb.weight

    def forward(self, ids):
        x = self.token_emb(ids)
        for norm_1, attn, norm_2, ff in self.layers:
            x = x + attn(norm_1(x))
            x = x + ff(norm_2(x))
        return self.to_logits(self.norm(x))


subject = Subject(
    kind="decoder",
    build=lambda c: AlibiGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    declares={
        "positions": "alibi",
        "slopes": "geometric",
        "tied": True,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": False,
    },
)
