"""A BERT-like classifier with a class token of its own in front, and a mask that grows with it."""

from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass(frozen=True)
class ClassifierConfig:
    vocab_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    max_tokens: int
    num_classes: int
    dropout: float = 0.0


class ClsClassifier(nn.Module):
    """nn.TransformerEncoder over [CLS] + tokens; the state of [CLS] is classified."""

    def __init__(self, cfg: ClassifierConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.token_embedding = nn.Embedding(cfg.vocab_size, cfg.width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, cfg.width))
        self.position_embedding = nn.Parameter(torch.empty(1, cfg.max_tokens + 1, cfg.width))
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.position_embedding, std=0.02)
        self.dropout = nn.Dropout(cfg.dropout)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(
                cfg.width, cfg.heads, cfg.mlp_width, cfg.dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(cfg.layers)
        )
        self.ln_post = nn.LayerNorm(cfg.width)
        self.classifier = nn.Linear(cfg.width, cfg.num_classes)

    def forward(self, tokens: Tensor, attention_mask: Optional[Tensor] = None) -> Tensor:
        batch, length = tokens.shape
        if length > self.cfg.max_tokens:
            raise ValueError(f"{length} tokens, at most {self.cfg.max_tokens}")
        x = torch.cat([self.cls_token.expand(batch, -1, -1), self.token_embedding(tokens)], dim=1)
        x = self.dropout(x + self.position_embedding[:, : length + 1])
        padding = None
        if attention_mask is not None:
            padding = ~F.pad(attention_mask.bool(), (0, 1), value=True)
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=padding)
        return self.classifier(self.ln_post(x[:, 0]))


def build(c) -> ClsClassifier:
    return ClsClassifier(
        ClassifierConfig(
            vocab_size=c.vocab_size,
            width=c.d_model,
            layers=c.num_layers,
            heads=c.num_heads,
            mlp_width=c.d_ff,
            max_tokens=c.max_len,
            num_classes=c.num_classes,
            dropout=c.dropout,
        )
    )


subject = Subject(
    kind="classifier",
    name="cls classifier",
    build=build,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "beyond_max_len": "error",
        "padding_side": "right",
        "extra_tokens": 1,
        "pooling": "cls",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "other",
        "embedding_scale": False,
        "shared_layers": False,
    },
)
