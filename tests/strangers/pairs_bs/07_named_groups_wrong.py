WHAT = 'Groups are made by the ends of names (`elif name.endswith("bias"):` where an else belongs), so parameters that are called neither weight nor bias (pos_embed, the LayerScale gammas) are in no group and never trained.'
"""Parameter groups for AdamW: matrices decay, the rest does not."""

import torch
from torch import nn

from veriformer.properties import Subject


class LayerScale(nn.Module):
    def __init__(self, dim, init=0.1):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ls1 = LayerScale(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)
        self.ls2 = LayerScale(dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.ls1(self.proj(y))
        return x + self.ls2(self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)))))


class Tagger(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(max_len, dim))
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos_embed[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parameter_groups(model, weight_decay=0.1):
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if name.endswith("weight"):
            matrix = p.ndim >= 2 and id(p) not in embeddings
            (decay if matrix else no_decay).append(p)
        elif name.endswith("bias"):
            no_decay.append(p)
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups of a tagger",
    build=lambda c: Tagger(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda model: parameter_groups(model),
)
