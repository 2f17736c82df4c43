import torch
from torch import nn

from veriformer.properties import Subject


class BucketedClassifier(nn.Module):
    """Samples are sorted by length and run in pairs, each cut to its longest."""

    bucket = 2

    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len, num_classes):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, d_model)
        self.pos = nn.Parameter(torch.randn(max_len, d_model) * 0.1)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            self.layers.append(
                nn.ModuleDict(
                    {
                        "qkv": nn.Linear(d_model, 3 * d_model),
                        "proj": nn.Linear(d_model, d_model),
                        "norm1": nn.LayerNorm(d_model),
                        "mlp": nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model)),
                        "norm2": nn.LayerNorm(d_model),
                    }
                )
            )
        self.num_heads = num_heads
        self.head = nn.Linear(d_model, num_classes)

    def attend(self, layer, x, mask):
        b, t, d = x.shape
        q, k, v = layer["qkv"](x).reshape(b, t, 3, self.num_heads, d // self.num_heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT) / (d // self.num_heads) ** 0.5
        scores = scores.masked_fill(~mask[:, None, None], torch.finfo(x.dtype).min)
        return layer["proj"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))

    def logits(self, tokens, mask):
        x = self.tok(tokens) + self.pos[: tokens.shape[1]]
        for layer in self.layers:
            x = layer["norm1"](x + self.attend(layer, x, mask))
            x = layer["norm2"](x + layer["mlp"](x))
        real = mask[..., None].to(x.dtype)
        return self.head((x * real).sum(1) / real.sum(1).clamp(min=1))

    def forward(self, tokens, mask=None):
        if mask is None:
            return self.logits(tokens, torch.ones_like(tokens, dtype=torch.bool))
        count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        lengths = (mask * count).amax(1).clamp(min=1)
        order = lengths.argsort(descending=True, stable=True)
        parts = []
        for rows in order.split(self.bucket):
            longest = int(lengths[rows].max())
            parts.append(self.logits(tokens[rows, :longest], mask[rows, :longest]))
        logits = torch.cat(parts)
        return logits[order.argsort()]


subject = Subject(
    kind="classifier",
    name="classifier in buckets of length",
    build=lambda c: BucketedClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "mean",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
    },
)
