WHAT = "the class token stands before the sequence but its entry in the mask is put behind it: with a mask everything is shifted by one (line 50)"
# A text classifier with a class token of its own, learned positions, pre-LN, and head after the class token.
import torch
from torch import nn, Tensor

from veriformer.properties import Subject


def mlp(sizes):
    return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.GELU(), nn.Linear(sizes[1], sizes[2]))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qk = nn.Linear(dim, 2 * dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.mlp = mlp((dim, hidden, dim))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        y = self.n1(x)
        q, k = self.qk(y).chunk(2, dim=-1)
        q, k, v = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, self.v(y))]
        logits = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~keep[:, None, None, :], -torch.inf)
        x = x + self.o(torch.einsum("bhij,bhjd->bihd", logits.softmax(-1), v).flatten(2))
        return x + self.mlp(self.n2(x))


class Classifier(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, longest, classes):
        super().__init__()
        self.words = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.randn(dim))
        self.places = nn.Parameter(torch.randn(longest + 1, dim) * 0.3)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length = tokens.shape
        first = self.cls.expand(batch, 1, -1)
        x = torch.cat([first, self.words(tokens)], dim=1) + self.places[: length + 1]
        if mask is None:
            mask = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
        seen = torch.ones(batch, 1, dtype=torch.bool, device=tokens.device)
        keep = torch.cat([mask, seen], dim=1)
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x[:, 0]))


def build(c):
    return Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


subject = Subject(
    kind="classifier",
    name="classifier with a class token",
    build=build,
    forward=forward,
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "padding_side": "right",
    },
)
