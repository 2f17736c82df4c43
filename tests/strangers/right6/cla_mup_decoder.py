"""Cross-layer sharing of keys and values (every second layer takes those of the one before) under muP's rules."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

BASE_WIDTH = 4


class Layer(nn.Module):
    def __init__(self, c, owns):
        super().__init__()
        d, self.h, self.k, self.owns = c.d_model, c.num_heads, c.d_model // c.num_heads, owns
        self.query, self.out = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
        self.memory = nn.Linear(d, 2 * d, bias=False) if owns else None
        self.norms = nn.ModuleDict({"attention": nn.LayerNorm(d), "feed": nn.LayerNorm(d)})
        self.feed = nn.Sequential(nn.Linear(d, c.d_ff, bias=False), nn.GELU(), nn.Linear(c.d_ff, d, bias=False))
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=m.in_features**-0.5)

    def forward(self, x, shared, hidden):
        b, t, d = x.shape
        y = self.norms["attention"](x)
        if self.owns:
            shared = self.memory(y).view(b, t, self.h, 2, self.k).permute(3, 0, 2, 1, 4)
        keys, values = shared
        q = self.query(y).view(b, t, self.h, self.k).transpose(1, 2)
        scores = torch.matmul(q, keys.transpose(2, 3)) / self.k  # muP: 1/d, not 1/sqrt(d)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        y = torch.matmul(torch.softmax(scores, 3), values)
        x = x + self.out(y.transpose(1, 2).contiguous().view(b, t, d))
        return x + self.feed(self.norms["feed"](x)), shared


class CLA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([Layer(c, i % 2 == 0) for i in range(c.num_layers)])
        self.norm, self.readout = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.multiplier = BASE_WIDTH / c.d_model

    def forward(self, tokens, mask=None):
        t = tokens.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        if mask is not None:
            hidden = hidden | ~mask.bool()[:, None, None]
        x, shared = self.embed(tokens) + self.place.weight.narrow(0, 0, t), None
        for layer in self.layers:
            x, shared = layer(x, shared, hidden)
        return self.readout(self.norm(x)) * self.multiplier


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="shared keys under muP", build=CLA, forward=forward,
    declares={
        "causal": True, "positions": "learned", "attention_scale": "1/d_head", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "gelu", "bias": False, "output_bias": False, "tied": False,
        "padding_side": "right", "beyond_max_len": "error", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=CLA, forward=forward)
