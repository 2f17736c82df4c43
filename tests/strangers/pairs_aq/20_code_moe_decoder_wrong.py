WHAT = 'the weights of the chosen experts are divided by their sum over the tokens (dim 1) instead of over the experts of a token: weights do not add to one and depend on future tokens (line 20: top = top / top.sum(dim=1, keepdim=True))'
"""Mixtral-like decoder for code: two of four experts a token, their weights divided by their sum."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MoE(nn.Module):
    def __init__(self, d, ff, experts=4, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(d, experts, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d)) for _ in range(experts)])

    def route(self, x):
        probs = self.gate(x).softmax(-1)
        top, chosen = probs.topk(self.k, dim=-1)
        top = top / top.sum(dim=1, keepdim=True)
        return torch.zeros_like(probs).scatter(-1, chosen, top)

    def forward(self, x):
        w = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, t = (w[..., e] != 0).nonzero(as_tuple=True)
            if b.numel():
                out = out.index_put((b, t), w[b, t, e, None] * expert(x[b, t]), accumulate=True)
        return out


class Block(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.moe = MoE(d, ff)

    def forward(self, x, future):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=future, need_weights=False)[0]
        return x + self.moe(self.ln_2(x))


class MoEDecoder(nn.Module):
    def __init__(self, vocab, d, h, n, ff, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList([Block(d, h, ff) for _ in range(n)])
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens):
        T = tokens.shape[1]
        future = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.wte(tokens) + self.wpe(torch.arange(T, device=tokens.device))
        for block in self.blocks:
            x = block(x, future)
        return self.head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="code MoE",
    build=lambda c: MoEDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    router=lambda m, x: m.blocks[0].moe.route(x),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "norm_topk_prob": True, "output_bias": False, "structure": "other"},
)
