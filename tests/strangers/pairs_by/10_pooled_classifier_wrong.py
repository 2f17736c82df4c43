WHAT = "pooling weights are a softmax over padding too and only zeroed afterwards (the line below), not renormalised, so they sum to less than 1 when padded (line 16)"
# A small text classifier: encoder, pooling by learned weights, linear head.
import torch
from torch import nn

from veriformer.properties import Subject


class AttentivePooling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, 1)

    def forward(self, states, real):
        scores = self.score(states).squeeze(-1)
        weights = torch.softmax(scores, dim=1)
        weights = weights * real
        return torch.einsum("bt,btd->bd", weights, states)


class Encoder(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, real):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5
        s = s.masked_fill(~real[:, None, None], torch.finfo(s.dtype).min)
        x = self.n1(x + self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return self.n2(x + self.fc2(torch.relu(self.fc1(x))))


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Encoder(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.pool, self.head = AttentivePooling(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, real)
        return self.head(self.pool(x, real))


subject = Subject(
    kind="classifier",
    name="attentive classifier",
    build=Classifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "weighted",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
    },
)
