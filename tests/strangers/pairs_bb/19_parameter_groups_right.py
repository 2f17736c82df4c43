"""Parameter groups of a small vision-transformer trunk: matrices and tables decay, biases and gains do not."""
import torch
from torch import nn

from veriformer.properties import Subject


class Trunk(nn.Module):
    def __init__(self, vocab_size, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, max_len, dim) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos_embed[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def configure_groups(model, weight_decay=0.05):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decay = [p for p in trained.values() if p.dim() >= 2]
    no_decay = [p for p in trained.values() if p.dim() < 2]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups of a trunk",
    build=lambda c: Trunk(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model: configure_groups(model),
)
