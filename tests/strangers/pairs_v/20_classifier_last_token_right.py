"""Classifier on a decoder: the last real token is pooled, wherever the padding stands."""

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

    def forward(self, x, allowed):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def states(self, tokens, attention_mask):
        """Positions are those among the real tokens; a padding token sees itself, so that no row is empty."""
        length = tokens.shape[1]
        itself = torch.eye(length, dtype=torch.bool, device=tokens.device)
        allowed = torch.ones_like(itself).tril() & attention_mask[:, None, None] | itself
        places = (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x)

    def last(self, attention_mask):
        """Index of the last real token of every sample."""
        steps = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return (steps * attention_mask).amax(dim=1)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        states = self.states(tokens, attention_mask)
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return self.head(states[rows, self.last(attention_mask)])


subject = Subject(
    kind="classifier",
    name="classifier on the last token",
    build=Classifier,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": True, "pooling": "last", "positions": "learned", "padding_side": "both", "norm": "layer", "norm_placement": "pre"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long)).shape)
