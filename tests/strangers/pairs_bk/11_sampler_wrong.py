WHAT = "The temperature divides the probabilities behind the softmax, not the logits before it; multinomial normalises it away, so that it has no effect (line 48)."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, width, heads, inner, dropout):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        n = self.norms[0](x)
        q, k, v = (f(n).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.mix(a))
        return x + self.drop(self.down(F.relu(self.up(self.norms[1](x)))))


class LanguageModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.context = c.max_len
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Parameter(torch.randn(c.max_len, c.d_model) * 0.1)
        self.stack = nn.Sequential(*(Layer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.norm(self.stack(x)))

    @torch.no_grad()
    def sample(self, tokens, steps, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(steps):
            logits = self(tokens[:, -self.context :])[:, -1, :]
            if top_k is not None:
                kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < kth, -float("inf"))
            probs = F.softmax(logits, dim=-1) / temperature
            drawn_from.append(probs)
            tokens = torch.cat([tokens, torch.multinomial(probs, 1)], dim=1)
        return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    build=LanguageModel,
    forward=lambda model, tokens: model(tokens),
    sampling=lambda model, tokens, steps, temperature=1.0, top_k=None: model.sample(tokens, steps, temperature, top_k),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "tied": False,
    },
)
