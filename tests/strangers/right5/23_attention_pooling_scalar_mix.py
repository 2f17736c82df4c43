WHAT = "classifier that mixes the states of all layers (ELMo's scalar mix), pools with two learned queries per head, and gives a dict; symmetric ALiBi as position, the head's weight is a parametrization: rows of length one times a learned logit scale"
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization


def slopes(h):
    whole = 1 << (h.bit_length() - 1)
    first = 2.0 ** (-8.0 * torch.arange(1, whole + 1, dtype=torch.float64) / whole)
    rest = 2.0 ** (-4.0 * torch.arange(1, 2 * (h - whole) + 1, 2, dtype=torch.float64) / whole)
    return torch.cat([first, rest])


class UnitRows(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows, 1))

    def forward(self, weight):
        return nn.functional.normalize(weight, dim=-1) * self.scale


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.in_proj, self.out_proj = nn.Parameter(torch.empty(3, h, d // h, d)), nn.Parameter(torch.empty(h, d // h, d))
        nn.init.normal_(self.in_proj, std=d**-0.5)
        nn.init.normal_(self.out_proj, std=d**-0.5)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Dropout(p), nn.Linear(ff, d))

    def forward(self, x, bias):
        q, k, v = torch.einsum("btd,nhkd->nbhtk", self.n1(x), self.in_proj)
        w = torch.softmax(torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5 + bias, -1)
        x = x + torch.einsum("bhts,bhsk,hkd->btd", w, v, self.out_proj)
        return x + self.ff(self.n2(x))


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, classes, p):
        super().__init__()
        self.h, self.embed = h, nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, h, ff, p) for _ in range(layers))
        self.mix = nn.Parameter(torch.zeros(layers + 1))
        self.gamma = nn.Parameter(torch.ones(()))
        self.norm = nn.LayerNorm(d)
        self.seeds = nn.Parameter(torch.randn(h, 2, d // h))
        self.key, self.value = nn.Linear(d, d), nn.Linear(d, d)
        self.head = nn.Linear(2 * d, classes)
        register_parametrization(self.head, "weight", UnitRows(classes))
        self.register_buffer("slopes", slopes(h), persistent=False)

    def forward(self, ids, mask=None):
        B, T = ids.shape
        x = self.embed(ids)
        at = torch.arange(T, device=ids.device)
        bias = -(at[:, None] - at).abs().to(x.dtype) * self.slopes.to(x.dtype)[:, None, None]
        bias = bias.expand(B, -1, -1, -1)
        low = torch.finfo(x.dtype).min / 2
        if mask is not None:
            bias = bias.masked_fill(~mask[:, None, None], low)
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1], bias))
        x = self.norm(self.gamma * torch.einsum("l,lbtd->btd", self.mix.softmax(0), torch.stack(states)))
        k, v = (f(x).view(B, T, self.h, -1) for f in (self.key, self.value))
        s = torch.einsum("hnk,bthk->bhnt", self.seeds, k) * self.seeds.shape[-1] ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None], low)
        w = s.softmax(-1)
        return {"logits": self.head(torch.einsum("bhnt,bthk->bnhk", w, v).flatten(1)), "weights": w}


from veriformer.properties import Subject


def build(c):
    return Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)["logits"]


undeclared = Subject(kind="classifier", build=build, forward=forward)
declared = Subject(
    kind="classifier", name="attention pooling", build=build, forward=forward,
    declares={"pooling": "weighted", "positions": "alibi", "bidirectional": False, "norm": "layer",
              "norm_placement": "pre", "activation": "relu", "structure": "other", "output_bias": True, "padding_side": "both"},
)
