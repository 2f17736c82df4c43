"""A BERT-like encoder ported from flax: heads in the kernels, masks turned to a bias, everything by einsum."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DenseGeneral(nn.Module):
    def __init__(self, equation, kernel, bias, fan_in):
        super().__init__()
        self.equation = equation
        self.kernel = nn.Parameter(torch.randn(*kernel) * fan_in**-0.5)
        self.bias = nn.Parameter(torch.zeros(*bias))

    def forward(self, x):
        return torch.einsum(self.equation, x, self.kernel) + self.bias


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        head = width // heads
        self.query, self.key, self.value = (
            DenseGeneral("btf,fhd->bthd", (width, heads, head), (heads, head), width) for _ in range(3)
        )
        self.out = DenseGeneral("bthd,hdf->btf", (heads, head, width), (width,), width)

    def forward(self, x, bias):
        query, key, value = self.query(x), self.key(x), self.value(x)
        query = query / query.size(-1) ** 0.5
        logits = torch.einsum("bqhd,bkhd->bhqk", query, key)
        if bias is not None:
            logits = logits + bias
        return self.out(torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), value))


class Layer(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(width, heads), nn.LayerNorm(width, eps=1e-12)
        self.intermediate = DenseGeneral("btf,fm->btm", (width, inner), (inner,), width)
        self.output = DenseGeneral("btm,mf->btf", (inner, width), (width,), inner)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x, bias):
        x = self.attention_norm(x + self.attention(x, bias))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x), approximate="tanh")))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word, self.position = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        x = self.norm(self.word(tokens) + self.position.weight[: tokens.size(1)])
        bias = None
        if attention_mask is not None:
            mask = attention_mask[:, None, None, :]
            bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min / 2)
        for layer in self.layers:
            x = layer(x, bias)
        return x


subject = Subject(
    kind="encoder",
    build=Encoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm_placement": "post", "activation": "gelu_tanh", "padding_side": "right"},
)
