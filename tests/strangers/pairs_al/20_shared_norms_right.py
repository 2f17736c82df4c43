import math
from functools import partial
import torch
from torch import nn
from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, inner, make_norm):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.intermediate, self.output = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.attention_norm, self.output_norm = make_norm(), make_norm()

    def forward(self, x, extended_mask):
        b, t, d = x.shape

        def heads(z):
            return z.view(b, t, self.heads, -1).permute(0, 2, 1, 3)

        scores = heads(self.query(x)) @ heads(self.key(x)).transpose(-1, -2) / math.sqrt(d // self.heads)
        probs = (scores + extended_mask).softmax(-1)
        context = (probs @ heads(self.value(x))).permute(0, 2, 1, 3).reshape(b, t, d)
        x = self.attention_norm(x + self.dense(context))
        return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))


class Bert(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        make_norm = partial(nn.LayerNorm, c.d_model, eps=1e-12)
        self.embedding_norm = make_norm()
        self.layer = nn.ModuleList(
            [BertLayer(c.d_model, c.num_heads, c.d_ff, make_norm) for _ in range(c.num_layers)])

    def forward(self, ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(ids)
        x = self.embedding_norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        extended = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, extended)
        return x


subject = Subject(
    kind="encoder", name="bert", build=Bert, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
              "padding_side": "right"},
)
