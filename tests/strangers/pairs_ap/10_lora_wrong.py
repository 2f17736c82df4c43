WHAT = "The merged weight is kept at the first evaluation without gradients and never dropped when A, B or the base change, so that later evaluations use stale weights (line 22 and the if below it in forward)."
"""A BERT-like encoder fine-tuned with LoRA on all projections of attention."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class LoRALinear(nn.Module):
    """y = x (W + alpha / r B A)^T + b; W and b stay as they were pretrained."""

    def __init__(self, in_features, out_features, r=2, alpha=4.0):
        super().__init__()
        self.base = nn.Linear(in_features, out_features)
        self.base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, in_features))
        self.lora_B = nn.Parameter(torch.zeros(out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scaling = alpha / r
        self._merged = None

    def delta(self):
        return self.scaling * self.lora_B @ self.lora_A

    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            weight = self.base.weight + self.delta()
        else:
            if self._merged is None:
                self._merged = self.base.weight + self.delta()
            weight = self._merged
        return nn.functional.linear(x, weight, self.base.bias)


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (LoRALinear(dim, dim) for _ in range(4))

    def forward(self, x, visible):
        split = lambda z: z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = q @ k.mT / math.sqrt(q.size(-1))
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = SelfAttention(c.d_model, c.num_heads)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model, eps=1e-12), nn.LayerNorm(c.d_model, eps=1e-12)
        self.ffn = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, visible):
        x = self.norm1(x + self.attention(x, visible))
        return self.norm2(x + self.ffn(x))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([EncoderLayer(c) for _ in range(c.num_layers)])

    def forward(self, tokens, attention_mask=None):
        x = self.words(tokens) + self.places(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return x


subject = Subject(
    kind="encoder",
    name="encoder with LoRA",
    build=Encoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "frozen": True,
    },
)
