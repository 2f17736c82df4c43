WHAT = "The last token is looked for at index sum(mask) - 1, which is right for padding on the right alone: padded on the left the class comes from a token in the middle (line 54)."
import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.ln1 = nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.ln2 = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, allowed):
        z = self.ln1(x)
        B, T, D = z.shape
        q = self.wq(z).reshape(B, T, self.h, -1)
        k = self.wk(z).reshape(B, T, self.h, -1)
        v = self.wv(z).reshape(B, T, self.h, -1)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, float("-inf"))
        y = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).reshape(B, T, D)
        x = x + self.wo(y)
        return x + self.ff(self.ln2(x))


class OPTForSequenceClassification(nn.Module):
    """The class is read off the last real token, which alone has seen all others."""

    def __init__(self, vocab, d, h, layers, ff, max_len, classes):
        super().__init__()
        self.tokens = nn.Embedding(vocab, d)
        self.positions = nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(DecoderLayer(d, h, ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d)
        self.score = nn.Linear(d, classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones(B, T, dtype=torch.bool, device=tokens.device)
        real = attention_mask.long()
        position_ids = (real.cumsum(1) - 1).clamp(min=0)
        eye = torch.eye(T, dtype=torch.bool, device=tokens.device)
        causal = torch.ones_like(eye).tril()
        allowed = (causal & attention_mask.bool()[:, None, None, :]) | eye

        x = self.tokens(tokens) + self.positions(position_ids)
        for layer in self.layers:
            x = layer(x, allowed)
        logits = self.score(self.norm(x))
        last = (real.sum(1) - 1).clamp(min=0)
        return logits[torch.arange(B, device=tokens.device), last]


subject = Subject(
    kind="classifier",
    name="OPT with a head for classes",
    build=lambda c: OPTForSequenceClassification(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "pooling": "last",
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
    },
)
