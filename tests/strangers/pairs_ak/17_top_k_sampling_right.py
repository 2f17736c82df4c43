"""Decoder with ALiBi and a sampler: temperature and top-k, for a batch of prompts."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def get_slopes(n):
    def power_of_2(n):
        start = 2.0 ** (-8.0 / n)
        return [start ** (i + 1) for i in range(n)]

    closest = 1 << (n.bit_length() - 1)
    if closest == n:
        return power_of_2(n)
    return power_of_2(closest) + power_of_2(2 * closest)[0::2][: n - closest]


class BloomBlock(nn.Module):
    def __init__(self, hidden, n_head, inner):
        super().__init__()
        self.n_head = n_head
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.dense = (nn.Linear(hidden, hidden) for _ in range(4))
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x, bias):
        h = self.input_layernorm(x)
        q, k, v = (f(h).unflatten(2, (self.n_head, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(2, 3) * q.size(-1) ** -0.5 + bias, dim=-1)
        x = x + self.dense((weights @ v).transpose(1, 2).flatten(2))
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class Bloom(nn.Module):
    def __init__(self, vocab, hidden, n_head, n_layer, inner):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.h = nn.ModuleList([BloomBlock(hidden, n_head, inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.slopes = get_slopes(n_head)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        t = torch.arange(ids.size(1), device=ids.device)
        distance = t[None, :] - t[:, None]
        bias = torch.tensor(self.slopes, dtype=x.dtype, device=x.device)[:, None, None] * distance
        bias = bias.masked_fill(distance > 0, float("-inf"))
        for block in self.h:
            x = block(x, bias)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, ids, max_new_tokens, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(max_new_tokens):
            logits = self(ids)[:, -1, :] / temperature
            if top_k is not None:
                best, _ = torch.topk(logits, min(top_k, logits.size(-1)), dim=-1)
                logits = logits.masked_fill(logits < best.amin(-1, keepdim=True), float("-inf"))
            probs = F.softmax(logits, dim=-1)
            drawn_from.append(probs)
            ids = torch.cat((ids, torch.multinomial(probs, num_samples=1)), dim=1)
        return ids, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="bloom with a sampler",
    build=lambda c: Bloom(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={
        "causal": True, "positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu", "tied": False,
    },
)
