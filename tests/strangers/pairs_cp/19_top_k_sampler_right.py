"""A small music-token GPT and its sampler: temperature, then the k likeliest."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class NoteBlock(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h, self.n1, self.n2 = h, nn.LayerNorm(d), nn.LayerNorm(d)
        self.a, self.p, self.f1, self.f2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x):
        q, k, v = self.a(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.p(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.f2(F.relu(self.f1(self.n2(x))))


class NoteGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.longest = c.max_len
        self.note, self.when = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.body = nn.Sequential(*(NoteBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)))
        self.out = nn.Sequential(nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False))

    def forward(self, notes):
        return self.out(self.body(self.note(notes) + self.when(torch.arange(notes.shape[1], device=notes.device))))


@torch.no_grad()
def sample(model, notes, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(notes[:, -model.longest :])[:, -1] / temperature
        vocab = logits.shape[-1]
        best, ids = logits.topk(vocab if top_k is None else min(top_k, vocab), dim=-1)
        p = best.softmax(-1)
        pick = torch.multinomial(p, 1)
        following = ids.gather(-1, pick)
        drawn_from.append(torch.zeros_like(logits).scatter(-1, ids, p))
        notes = torch.cat([notes, following], dim=1)
    return notes, torch.stack(drawn_from, 1)


subject = Subject(
    kind="decoder",
    build=NoteGPT,
    forward=lambda m, tokens: m(tokens),
    sampling=sample,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)
