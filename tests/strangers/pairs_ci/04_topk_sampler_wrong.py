"""A nano GPT with the sampler of a small server."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_a(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln_b(x))))


class Nano(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.max_len = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))

    @torch.no_grad()
    def sample(self, idx, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(idx[:, -self.max_len :])[:, -1] / temperature
            if top_k is not None:
                best = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values
                cut = best.amin()
                logits = logits.masked_fill(logits < cut, -torch.inf)
            probs = logits.softmax(-1)
            drawn_from.append(probs)
            idx = torch.cat([idx, torch.multinomial(probs, 1)], 1)
        return idx, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    name="nano with sampler",
    build=Nano,
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm_placement": "pre"},
)

WHAT = (
    'The cut of top-k is the smallest kept logit of the whole batch, not of each row: with a batch of several, rows sample from more than k tokens'
    ' (line 47).'
)
