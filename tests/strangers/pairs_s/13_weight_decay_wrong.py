WHAT = 'line 37: parameters without decay are found by the name "LayerNorm.weight", copied from BERT, while the norms are called attn_norm, ffn_norm and final_norm here, so their gains are decayed'
"""A small encoder, and the groups of parameters that its AdamW gets."""

import torch
from torch import nn

from veriformer.properties import Subject


class EncoderBlock(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attn_norm = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.ffn_norm = nn.LayerNorm(d_model)
        self.ffn_in = nn.Linear(d_model, d_ff)
        self.ffn_out = nn.Linear(d_ff, d_model)

    def forward(self, x):
        n = self.attn_norm(x)
        x = x + self.attn(n, n, n, need_weights=False)[0]
        return x + self.ffn_out(torch.relu(self.ffn_in(self.ffn_norm(x))))


class Tagger(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.Sequential(*[EncoderBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.final_norm = nn.LayerNorm(c.d_model)
        self.tags = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens):
        return self.tags(self.final_norm(self.layers(self.embeddings(tokens))))


NO_DECAY = ("bias", "LayerNorm.weight")


def optimizer_grouped_parameters(model, weight_decay=0.01):
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        (free if any(part in name for part in NO_DECAY) else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of a tagger",
    build=Tagger,
    forward=lambda model: optimizer_grouped_parameters(model),
)
