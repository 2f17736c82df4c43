WHAT = "The stages are lambdas that close over the loop variable (line 39), which is the last layer by the time they run: the last layer is applied num_layers times and the others never."
"""An encoder whose layers become a list of stages first (for remat and pipelining) and run afterwards."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_att, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x, allowed):
        B, T, D = x.shape
        h = self.norm_att(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def stages(self, allowed):
        stages = []
        for layer in self.layers:
            stages.append(lambda x: layer(x, allowed))
        return stages

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        x = self.embed(tokens) + self.place(torch.arange(T, device=tokens.device))
        allowed = None if mask is None else mask[:, None, None, :].expand(B, 1, T, T)
        for stage in self.stages(allowed):
            x = stage(x)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="staged encoder",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": False,
        "padding_side": "right",
    },
)
