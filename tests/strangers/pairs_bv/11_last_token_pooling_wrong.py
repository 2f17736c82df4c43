WHAT = "the last real token is looked up at mask.sum - 1, which is its place only where padding stands on the right; of a batch padded on the left it takes a token in the middle or padding (line 44: last = (mask.sum(dim=-1) - 1).clamp(min=0))"
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.relu(self.up(self.n2(x))))


class AlibiClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        h = c.num_heads
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, h, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, h + 1) / h), persistent=False)

    def forward(self, input_ids, attention_mask=None):
        b, t = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = attention_mask.bool()
        x = self.embed(input_ids)
        pos = torch.arange(t, device=x.device)
        bias = -self.slopes.view(1, -1, 1, 1).to(x.dtype) * (pos[:, None] - pos[None]).abs()
        bias = bias.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        for layer in self.layers:
            x = layer(x, bias)
        last = (mask.sum(dim=-1) - 1).clamp(min=0)
        return self.score(self.norm(x[torch.arange(b, device=x.device), last]))


subject = Subject(
    kind="classifier",
    build=AlibiClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"positions": "alibi", "pooling": "last", "padding_side": "both", "norm_placement": "pre", "final_norm": True, "activation": "relu"},
    domain={"num_heads": (2, 4)},
)
