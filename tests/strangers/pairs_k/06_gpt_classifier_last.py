"""A causal backbone with a classification head on its last real token, as GPT2ForSequenceClassification has it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The pooled token is the one at index (number of real tokens - 1), which is a wrong one where padding is on the left."
CAUSE = (
    "With padding on the left the classifier pools the wrong position: it indexes by the count of real tokens minus one, "
    "not by the last real position, so the result depends on the amount of padding."
)


def by_place(mask):
    index = torch.arange(mask.shape[1], device=mask.device)
    return (index * mask.long()).argmax(-1)


def by_count(mask):
    return (mask.long().sum(-1) - 1).clamp(min=0)


def make(pick):
    class Block(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
            self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
            self.h = c.num_heads

        def forward(self, x, bias):
            y = self.ln_1(x)
            q, k, v = (f(y).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
            scores = q @ k.mT / q.shape[-1] ** 0.5 + bias
            x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class GPTForSequenceClassification(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.h = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
            self.ln_f = nn.LayerNorm(c.d_model)
            self.score = nn.Linear(c.d_model, c.num_classes, bias=False)

        def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
            x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
            B, T = x.shape[:2]
            if attention_mask is None:
                attention_mask = torch.ones(B, T, dtype=torch.bool, device=x.device)
            attention_mask = attention_mask.bool()
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            x = x + self.wpe(position_ids)
            seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril() & attention_mask[:, None, None, :]
            bias = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~seen, torch.finfo(x.dtype).min)
            for block in self.h:
                x = block(x, bias)
            logits = self.score(self.ln_f(x))
            return logits[torch.arange(B, device=x.device), pick(attention_mask)]

    return GPTForSequenceClassification


def subject(pick):
    return Subject(
        kind="classifier",
        name="GPT for sequence classification",
        build=make(pick),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, embeddings, attention_mask=None: m(None, attention_mask, embeddings),
        declares={
            "pooling": "last",
            "padding_side": "both",
            "positions": "learned",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
        },
    )


right = subject(by_place)
wrong = subject(by_count)
