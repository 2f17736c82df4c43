import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mha = nn.MultiheadAttention(d, h, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, hidden_keys):
        y = self.ln1(x)
        x = x + self.mha(y, y, y, key_padding_mask=hidden_keys, need_weights=False)[0]
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class DistilledClassifier(nn.Module):
    def __init__(self, vocab, d, h, layers, f, max_len, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.cls_token = nn.Parameter(torch.randn(d))
        self.dist_token = nn.Parameter(torch.randn(d))
        self.pos_embed = nn.Parameter(torch.randn(max_len + 2, d))
        self.layers = nn.ModuleList(Layer(d, h, f) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head, self.head_dist = nn.Linear(d, classes), nn.Linear(d, classes)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        extra = torch.stack((self.cls_token, self.dist_token)).expand(len(x), 2, -1)
        x = torch.cat((extra, x), 1)
        x = x + self.pos_embed[: x.shape[1]]
        hidden = None if mask is None else ~F.pad(mask, (2, 0), value=True)
        for layer in self.layers:
            x = layer(x, hidden)
        x = self.norm(x)
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


subject = Subject(
    kind="classifier",
    name="DeiT on tokens",
    build=lambda c: DistilledClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "other", "extra_tokens": 2, "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "gelu", "padding_side": "right"},
)
