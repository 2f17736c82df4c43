"""Hugging Face style: batches are dictionaries, the model computes its own loss and returns an output object."""
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn

from veriformer.ablations import Recipe, Study, Task, Variant


@dataclass
class Config:
    vocab_size: int = 16
    hidden_size: int = 24
    num_attention_heads: int = 2
    num_hidden_layers: int = 1
    num_labels: int = 3
    hidden_dropout_prob: float = 0.1
    pooling: str = "cls"


@dataclass
class Output:
    loss: Optional[torch.Tensor] = None
    logits: Optional[torch.Tensor] = None


class TinyBertForSequenceClassification(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(16, config.hidden_size)
        layer = nn.TransformerEncoderLayer(config.hidden_size, config.num_attention_heads, 2 * config.hidden_size,
                                           config.hidden_dropout_prob, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        pos = torch.arange(input_ids.shape[1])[None]
        h = self.word_embeddings(input_ids) + self.position_embeddings(pos)
        h = self.encoder(h, src_key_padding_mask=attention_mask == 0)
        if self.config.pooling == "cls":
            h = h[:, 0]
        else:
            m = attention_mask[..., None].float()
            h = (h * m).sum(1) / m.sum(1)
        logits = self.classifier(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return Output(loss, logits)


def model_init(**overrides):
    return TinyBertForSequenceClassification(Config(**overrides))


def tokenize(g):
    lengths = torch.randint(4, 11, (24,), generator=g)
    mask = (torch.arange(10)[None] < lengths[:, None]).long()
    ids = torch.randint(2, 16, (24, 10), generator=g)
    ids[:, 0] = 1
    ids = ids * mask
    ones = (ids == 5).any(1).long()
    twos = (ids == 9).any(1).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ones + twos}


generator = torch.Generator().manual_seed(0)
batches = [tokenize(generator) for _ in range(50)]


def compute_loss(model, inputs):
    return model(**inputs).loss


def compute_metrics(model, inputs):
    labels = inputs["labels"]
    rest = {k: v for k, v in inputs.items() if k != "labels"}
    with torch.no_grad():
        preds = model(**rest).logits.argmax(-1)
    return (preds == labels).float().mean()


study = Study(
    name="pooling",
    question="CLS or mean?",
    build=model_init,
    tasks=Task(name="how-many", data=batches, loss=compute_loss, metric=compute_metrics),
    optimizer=lambda model: torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
         {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}], lr=3e-3),
    recipe=Recipe(steps=50),
    variants=[
        Variant("cls"),
        Variant("mean", "pooling by the first token", {"pooling": "mean"}),
        Variant("no dropout", "dropout", {"hidden_dropout_prob": 0.0}),
        Variant("four heads", "two heads", {"num_attention_heads": 4}),
    ],
)
