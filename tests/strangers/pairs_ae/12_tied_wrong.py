WHAT = "Tying assigns .data: two parameters over one storage instead of one parameter, each with its own gradient and optimizer state, counted twice and parted by anything that replaces a tensor (line 38)."
"""A post-norm language model whose output projection is its embedding table."""

import torch
from torch import nn

from veriformer.properties import Subject


class PostNormLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, h, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, hide):
        x = self.n1(x + self.attn(x, x, x, attn_mask=hide, need_weights=False)[0])
        return self.n2(x + self.ff(x))


class TiedLM(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.place = nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([PostNormLayer(d, h, ff) for _ in range(layers)])
        self.decode = nn.Linear(d, vocab, bias=False)
        self.reset()
        self.tie()

    def reset(self):
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def tie(self):
        assert self.decode.weight.shape == self.embed.weight.shape
        self.decode.weight.data = self.embed.weight.data

    def forward(self, tokens):
        T = tokens.shape[1]
        hide = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed(tokens) + self.place.weight[:T]
        for layer in self.layers:
            x = layer(x, hide)
        return self.decode(x)


subject = Subject(
    kind="decoder",
    name="tied language model",
    build=lambda c: TiedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens),
    declares={
        "tied": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "bias": True,
        "output_bias": False,
    },
)
