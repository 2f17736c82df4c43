"""Weight decay of a small vision Transformer: matrices of linear maps decay; biases, norms and tables do not."""

import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))  # LayerScale

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.gamma * self.proj(y.transpose(1, 2).flatten(2))
        return x + self.gamma * self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, longest):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.randn(1, longest + 1, dim) * 0.02)
        self.blocks = nn.Sequential(*[Block(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens):
        x = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), self.embed(tokens)], 1)
        return self.norm(self.blocks(x + self.pos[:, : x.shape[1]]))


def groups(model, decay=0.05):
    decayed, plain = [], []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                decayed.append(p)
            elif name == "bias" or isinstance(module, (nn.LayerNorm, nn.Embedding)):
                plain.append(p)
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="vit groups",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model: groups(model),
)

WHAT = 'Only biases, norms and embeddings are taken into the group without decay (line 45): bare parameters (class token, position table, LayerScale) are in no group and never trained.'
