WHAT = "The group without decay takes parameters of exactly one dimension: the 0-dimensional logit_scale is in neither group and never trained (line 38: `nodecay_params = [p for n, p in param_dict.items() if p.dim() == 1]`)."
"""Parameter groups for AdamW of a small text tower with CLIP's learned temperature."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class TextTower(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, d_ff, context_length):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.randn(context_length, width) * 0.01)
        self.resblocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, d_ff, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, width) * width**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        for block in self.resblocks:
            x = block(x)
        x = self.ln_final(x).mean(1) @ self.text_projection
        x = x / x.norm(dim=-1, keepdim=True)
        return self.logit_scale.exp() * x @ x.t()

    def optim_groups(self, weight_decay=0.2):
        # filter out those that do not require grad
        param_dict = {pn: p for pn, p in self.named_parameters() if p.requires_grad}
        # matrices decay, biases and gains and the like don't
        decay_params = [p for n, p in param_dict.items() if p.dim() >= 2]
        nodecay_params = [p for n, p in param_dict.items() if p.dim() == 1]
        return [
            {"params": decay_params, "weight_decay": weight_decay},
            {"params": nodecay_params, "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="groups of a CLIP text tower",
    build=lambda c: TextTower(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model: model.optim_groups(),
)
