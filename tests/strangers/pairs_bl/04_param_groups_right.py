"""Fine-tuning: take a pre-trained encoder, give it a new head, and split its parameters for AdamW."""

import torch
from torch import nn

from veriformer.properties import Subject


class Encoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max_len, width)
        layer = lambda: nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)  # noqa: E731
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class FineTuner(nn.Module):
    def __init__(self, c, weight_decay=0.01):
        super().__init__()
        self.encoder = Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len)
        self.head = nn.Linear(c.d_model, c.vocab_size)  # of pre-training: what the checkpoint has
        self.weight_decay = weight_decay
        self.reset_classifier(c.num_classes)
        self.groups = self.split_parameters()

    def reset_classifier(self, num_classes):
        self.head = nn.Linear(self.head.in_features, num_classes)
        nn.init.zeros_(self.head.bias)

    def split_parameters(self):
        decay, rest = [], []
        for parameter in self.parameters():
            if parameter.requires_grad:
                (decay if parameter.ndim >= 2 else rest).append(parameter)
        return [{"params": decay, "weight_decay": self.weight_decay}, {"params": rest, "weight_decay": 0.0}]

    def configure_optimizers(self, lr=1e-4):
        return torch.optim.AdamW(self.groups, lr=lr)

    def forward(self, tokens):
        return self.head(self.encoder(tokens)[:, 0])


subject = Subject(
    kind="parameter_groups",
    name="groups of a fine-tuner",
    build=FineTuner,
    forward=lambda m: [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in m.configure_optimizers().param_groups
    ],
)
