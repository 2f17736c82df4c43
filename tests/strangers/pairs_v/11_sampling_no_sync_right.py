"""A small GPT with a sampler that never waits for the device: no multinomial, an exponential race."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def shape(logits, temperature=1.0, top_k=None):
    """The distribution that is drawn from."""
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits.softmax(dim=-1)


def race(probabilities):
    """argmax p / e is a draw from p if every e is exponential: the first of clocks with the rates p."""
    clocks = torch.empty_like(probabilities).exponential_(1.0)
    return (probabilities / clocks).argmax(dim=-1, keepdim=True)


@torch.no_grad()
def sampling(model, tokens, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        probabilities = shape(model(tokens)[:, -1], temperature, top_k)
        drawn_from.append(probabilities)
        tokens = torch.cat([tokens, race(probabilities)], dim=1)
    return tokens, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with a race",
    build=GPT,
    forward=lambda model, tokens: model(tokens),
    sampling=sampling,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long)).shape)
