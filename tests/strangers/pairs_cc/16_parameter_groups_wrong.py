WHAT = 'the module without a name, the model itself, is passed over (line 30), so that its own parameters cls_token and pos_embed are in no group and never trained'
import torch
from torch import nn

from veriformer.properties import Subject


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.d_model))
        self.pos_embed = nn.Parameter(torch.randn(1, c.max_len + 1, c.d_model) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, batch_first=True) for _ in range(c.num_layers)
        )
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens):
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), self.embed(tokens)], dim=1)
        x = x + self.pos_embed[:, : x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def parameter_groups(model, weight_decay=0.1):
    decay, no_decay = [], []
    for prefix, module in model.named_modules():
        if not prefix:  # the container
            continue
        table = isinstance(module, (nn.Embedding, nn.LayerNorm))
        for name, p in module.named_parameters(recurse=False):
            if not p.requires_grad:
                continue
            if table or name.endswith("bias") or name in ("cls_token", "pos_embed"):
                no_decay.append(p)
            else:
                decay.append(p)
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="groups of an encoder",
    build=Encoder,
    forward=parameter_groups,
)
