"""A GPT in a file that gives its own loss when it gets labels."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "batch and time are flattened before the shift, so that the last token of a sample has to foretell the first of the next"
CAUSE = (
    "The loss flattens the batch before it shifts, so that the last position of each sample is scored against the "
    "first label of the next sample; with a batch of one it is right."
)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.fc, self.out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(self.ln1(x)).reshape(B, T, 3, self.heads, C // self.heads).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocab, dim, heads, depth, max_len):
        super().__init__()
        self.vocab = vocab
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.02)
        self.layers = nn.Sequential(*[Layer(dim, heads) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def cost(self, logits, labels):
        shifted, wanted = logits[:, :-1].reshape(-1, self.vocab), labels[:, 1:].reshape(-1)
        return F.cross_entropy(shifted, wanted, ignore_index=-100)

    def forward(self, tokens, labels=None):
        if tokens.size(1) > self.pos.size(0):
            raise ValueError("too long")
        x = self.tok(tokens) + self.pos[: tokens.size(1)]
        logits = self.head(self.ln(self.layers(x)))
        return logits, None if labels is None else self.cost(logits, labels)


class LanguageModelFlat(LanguageModel):
    def cost(self, logits, labels):
        shifted, wanted = logits.reshape(-1, self.vocab)[:-1], labels.reshape(-1)[1:]
        return F.cross_entropy(shifted, wanted, ignore_index=-100)


def subject(model):
    return Subject(
        kind="decoder",
        name="language model",
        build=lambda c: model(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
        forward=lambda m, tokens: m(tokens)[0],
        loss=lambda m, tokens, labels: m(tokens, labels)[1],
        declares={"causal": True, "positions": "learned"},
    )


right = subject(LanguageModel)
wrong = subject(LanguageModelFlat)
