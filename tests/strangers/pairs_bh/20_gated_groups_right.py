"""Parameter groups for AdamW of a ReZero Transformer: matrices decay; gains, biases and the scalar gates do not."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ReZeroBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.alpha_attn = nn.Parameter(torch.tensor(0.0))
        self.alpha_mlp = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        x = x + self.alpha_attn * self.attn(x, x, x, need_weights=False)[0]
        return x + self.alpha_mlp * self.fc2(F.gelu(self.fc1(x)))


class ReZeroEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([ReZeroBlock(dim, heads, hidden) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def optim_groups(self, weight_decay=0.1):
        params = [p for p in self.parameters() if p.requires_grad]
        decay = [p for p in params if p.ndim >= 2]
        nodecay = [p for p in params if p.ndim <= 1]
        return [
            {"params": decay, "weight_decay": weight_decay},
            {"params": nodecay, "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="groups of a ReZero encoder",
    build=lambda c: ReZeroEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model: model.optim_groups(),
)
