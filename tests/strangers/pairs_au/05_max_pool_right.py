import torch
import torch.nn as nn

from veriformer.properties import Subject


class SentimentNet(nn.Module):
    """nn.TransformerEncoder, then the maximum over time of every channel, then a linear classifier."""

    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model)
        layer = nn.TransformerEncoderLayer(
            config.d_model,
            config.num_heads,
            dim_feedforward=config.d_ff,
            dropout=config.dropout,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, config.num_layers, norm=nn.LayerNorm(config.d_model), enable_nested_tensor=False
        )
        self.classifier = nn.Linear(config.d_model, config.num_classes)

    def pool(self, states, mask):
        if mask is not None:
            states = states.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return states.max(dim=1).values

    def forward(self, tokens, mask=None):
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        states = self.embed(tokens) + self.positions(steps)
        states = self.encoder(states, src_key_padding_mask=None if mask is None else ~mask)
        return self.classifier(self.pool(states, mask))


subject = Subject(
    kind="classifier",
    name="SentimentNet",
    build=SentimentNet,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "max", "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu", "padding_side": "right",
    },
)
