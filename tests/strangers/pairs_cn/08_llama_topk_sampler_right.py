"""A small Llama-like language model with learned positions, and its top-k sampler."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.pre_attn, self.pre_ffn = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def attend(self, x):
        b, t, d = x.shape
        q, k, v = self.wqkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))

    def forward(self, x):
        x = x + self.attend(self.pre_attn(x))
        h = self.pre_ffn(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class LM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, context):
        super().__init__()
        self.context = context
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def sample(self, ids, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(ids[:, -self.context :])[:, -1] / temperature
            if top_k is not None:
                best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
                logits = logits.masked_fill(logits < best.amin(-1, keepdim=True), float("-inf"))
            drawn_from.append(logits)
            ids = torch.cat((ids, torch.multinomial(logits.softmax(-1), 1)), dim=1)
        return ids, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="small LM with top-k",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "positions": "learned",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
    },
)
