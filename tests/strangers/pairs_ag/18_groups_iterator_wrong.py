WHAT = '`filter` gives an iterator, which the list of decayed parameters has used up when the list of those without decay is made (line 22: not put into a list): the second group is empty, and no bias and no norm is ever trained.'
"""Two parameter groups for AdamW: matrices decay, vectors do not."""
import torch
from torch import nn

from veriformer.properties import Subject


class TinyEncoder(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, d_ff, num_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        layer = nn.TransformerEncoderLayer(d_model, num_heads, d_ff, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(d_model), enable_nested_tensor=False)
        self.head = nn.Linear(d_model, vocab_size)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def get_optim_groups(model, weight_decay=0.1):
    params = filter(lambda p: p.requires_grad, model.parameters())
    decay = [p for p in params if p.dim() >= 2]
    no_decay = [p for p in params if p.dim() < 2]
    return [
        {"params": decay, "weight_decay": weight_decay},
        {"params": no_decay, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="optimizer groups",
    build=lambda c: TinyEncoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m: get_optim_groups(m),
)
