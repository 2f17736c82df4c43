WHAT = "The model's own loss hands probabilities to cross_entropy, which takes the softmax once more (line 44): the loss cannot fall below log(e + C - 1) - 1 and gradients are far too small; the logits are right."
"""A text classifier in Hugging Face style: logits, and a loss when labels are given."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor
    probabilities: torch.Tensor


class SequenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Parameter(0.3 * torch.randn(c.max_len, c.d_model))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                c.d_model, c.num_heads, c.d_ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.score = nn.Linear(c.d_model, c.num_classes)

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embed(input_ids) + self.positions[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~attention_mask)
        x = self.norm(x)
        real = attention_mask[..., None].to(x.dtype)
        logits = self.score((x * real).sum(1) / real.sum(1).clamp(min=1))
        probabilities = logits.softmax(dim=-1)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(probabilities, labels)
        return Output(loss, logits, probabilities)


subject = Subject(
    kind="classifier",
    name="sequence classifier",
    build=SequenceClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask).logits,
    loss=lambda m, tokens, labels: m(tokens, labels=labels).loss,
    declares={
        "pooling": "mean",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "padding_side": "right",
    },
)
