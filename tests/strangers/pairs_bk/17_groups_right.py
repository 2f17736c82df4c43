import torch
from torch import nn

from veriformer.properties import Subject


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, batch_first=True, norm_first=True)
            for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def configure_groups(model, weight_decay=0.1):
    decay, no_decay = [], []
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if name.endswith("bias") or isinstance(module, nn.LayerNorm):
                no_decay.append(parameter)
            elif isinstance(module, (nn.Linear, nn.Embedding, nn.MultiheadAttention)):
                decay.append(parameter)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    build=Encoder,
    forward=lambda model: configure_groups(model),
)
