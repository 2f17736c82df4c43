WHAT = "ALBERT: one post-norm layer applied num_layers times, factorised embedding, masked-LM head through the factor tied to the table, with a bias of its own; one dropout module everywhere"
import math

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, d, h, ff, drop):
        super().__init__()
        self.h = h
        self.query, self.key, self.value, self.dense = (nn.Linear(d, d) for _ in range(4))
        self.LayerNorm, self.full_layer_layer_norm = nn.LayerNorm(d, eps=1e-12), nn.LayerNorm(d, eps=1e-12)
        self.ffn, self.ffn_output, self.drop = nn.Linear(d, ff), nn.Linear(ff, d), drop

    def forward(self, x, extra):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.h, -1).permute(0, 2, 1, 3) for f in (self.query, self.key, self.value))
        s = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D // self.h) + extra
        y = torch.matmul(self.drop(s.softmax(-1)), v).permute(0, 2, 1, 3).reshape(B, T, D)
        x = self.LayerNorm(x + self.drop(self.dense(y)))
        f = self.ffn(x)
        f = 0.5 * f * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (f + 0.044715 * torch.pow(f, 3.0))))
        return self.full_layer_layer_norm(self.drop(self.ffn_output(f)) + x)


class Albert(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, max_len, p):
        super().__init__()
        e = max(2, d // 2)
        self.times, self.drop = layers, nn.Dropout(p)
        self.word, self.place, self.embedding_norm = nn.Embedding(vocab, e), nn.Embedding(max_len, e), nn.LayerNorm(e, eps=1e-12)
        self.map_in = nn.Linear(e, d)
        self.layer = Layer(d, h, ff, self.drop)
        self.head, self.head_norm, self.head_bias = nn.Linear(d, e), nn.LayerNorm(e, eps=1e-12), nn.Parameter(torch.zeros(vocab))

    def forward(self, ids, mask=None):
        x = self.word(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        x = self.map_in(self.drop(self.embedding_norm(x)))
        if mask is None:
            mask = torch.ones_like(ids, dtype=torch.bool)
        extra = (1.0 - mask[:, None, None].to(x.dtype)) * (torch.finfo(x.dtype).min / 2)
        for _ in range(self.times):
            x = self.layer(x, extra)
        return nn.functional.linear(self.head_norm(nn.functional.gelu(self.head(x))), self.word.weight, self.head_bias)


from veriformer.properties import Subject


def build(c):
    return Albert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="albert", build=build, forward=forward,
    declares={"causal": False, "shared_layers": True, "positions": "learned", "norm": "layer", "norm_placement": "post",
              "activation": "gelu_tanh", "tied": True, "bias": True, "output_bias": True, "structure": "other",
              "padding_side": "right", "beyond_max_len": "error"},
)
