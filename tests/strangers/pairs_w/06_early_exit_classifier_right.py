"""A classifier with a head at every layer: a sample keeps the answer of the first head that is sure of it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def heads_of(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, real):
        y = self.norm_a(x)
        q, k, v = self.heads_of(self.q(y)), self.heads_of(self.k(y)), self.heads_of(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_f(x))))


class EarlyExitClassifier(nn.Module):
    """All layers run for all samples here, so that a batch stays rectangular; serving stops a sample where it is sure."""

    def __init__(self, vocab, width, heads, layers, inner, length, classes, threshold=0.6):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([EncoderLayer(width, heads, inner) for _ in range(layers)])
        self.exits = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes)) for _ in range(layers)])
        self.threshold = threshold

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        share = real[..., None].to(x.dtype)
        share = share / share.sum(1, keepdim=True).clamp(min=1)
        answer = None
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
        for layer, exit_head in zip(self.layers, self.exits):
            x = layer(x, real)
            logits = exit_head((x * share).sum(1))
            answer = logits if answer is None else torch.where(done[:, None], answer, logits)
            sure = logits.softmax(dim=-1).amax(dim=-1) > self.threshold
            done = done | sure
        return answer


subject = Subject(
    kind="classifier",
    name="early exit",
    build=lambda c: EarlyExitClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "mean",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "padding_side": "right",
        "structure": "other",
    },
)
