WHAT = "DeBERTa: content-to-content + content-to-position + position-to-content scores over sqrt(3 d_head), one table of relative embeddings (normalised) shared by the layers, padding embeddings zeroed"
import math

import torch
from torch import nn

SPAN = 6


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.pos_q, self.pos_k = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.n1, self.n2 = nn.LayerNorm(d, eps=1e-7), nn.LayerNorm(d, eps=1e-7)
        self.up, self.down, self.drop = nn.Linear(d, ff), nn.Linear(ff, d), nn.Dropout(p)

    def forward(self, x, rel, near, seen):
        B, T, D = x.shape
        K = D // self.h
        q, k, v = (f(x).view(B, T, self.h, K).transpose(1, 2) for f in (self.q, self.k, self.v))
        pk, pq = (f(rel).view(-1, self.h, K).transpose(0, 1) for f in (self.pos_k, self.pos_q))  # [h, 2 SPAN, K]
        scale = 1.0 / math.sqrt(3 * K)
        c2c = q @ k.mT
        to = near[None, None].expand(B, self.h, T, T)
        c2p = torch.gather(q @ pk.mT, -1, to)  # query i, offset i - j
        p2c = torch.gather(k @ pq.mT, -1, to).mT  # key j, offset j - i
        s = (c2c + c2p + p2c) * scale
        w = s.masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~seen, 0.0)
        y = (self.drop(w) @ v).transpose(1, 2).reshape(B, T, D)
        x = self.n1(x + self.drop(self.o(y)))
        return self.n2(x + self.drop(self.down(nn.functional.gelu(self.up(x)))))


class Deberta(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.words, self.norm = nn.Embedding(vocab, d), nn.LayerNorm(d, eps=1e-7)
        self.relative, self.relative_norm = nn.Embedding(2 * SPAN, d), nn.LayerNorm(d, eps=1e-7)
        self.layers = nn.ModuleList(Layer(d, h, ff, p) for _ in range(layers))

    def forward(self, ids, mask=None):
        B, T = ids.shape
        if mask is None:
            mask = torch.ones(B, T, dtype=torch.bool, device=ids.device)
        x = self.norm(self.words(ids)) * mask[..., None].to(self.words.weight.dtype)
        at = torch.arange(T, device=ids.device)
        near = (at[:, None] - at[None] + SPAN).clamp(0, 2 * SPAN - 1)
        seen = (mask[:, :, None] & mask[:, None, :])[:, None]
        rel = self.relative_norm(self.relative.weight)
        for layer in self.layers:
            x = layer(x, rel, near, seen)
        return x


from veriformer.properties import Subject


def build(c):
    return Deberta(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="disentangled", build=build, forward=forward, domain={"d_model": (8, 8), "num_heads": (2, 2)},
    declares={"causal": False, "positions": "relative", "bidirectional": True, "attention_scale": 1 / math.sqrt(12),
              "norm": "layer", "norm_placement": "post", "activation": "gelu", "structure": "other", "padding_side": "both",
              "beyond_max_len": "works"},
)
