"""A Hugging Face model with a head of our own, as a fine-tuner has it: the mean of the states of real tokens."""

import torch
from torch import nn
from transformers import BertConfig, BertModel

from veriformer.properties import Subject


class Classifier(nn.Module):
    def __init__(self, config: BertConfig, num_classes: int) -> None:
        super().__init__()
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(config.hidden_size, num_classes)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        states = self.encoder(tokens, attention_mask=attention_mask).last_hidden_state
        real = attention_mask[..., None].to(states.dtype)
        return self.head((states * real).sum(1) / real.sum(1).clamp(min=1))


def build(sizes) -> Classifier:
    """Return the classifier in sizes that are checked; the same code is trained in the sizes of the checkpoint."""
    config = BertConfig(
        vocab_size=sizes.vocab_size, hidden_size=sizes.d_model, num_attention_heads=sizes.num_heads,
        num_hidden_layers=sizes.num_layers, intermediate_size=sizes.d_ff, max_position_embeddings=sizes.max_len,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None,
    )  # fmt: skip
    return Classifier(config, sizes.num_classes)


classifier = Subject(
    kind="classifier",
    build=build,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"pooling": "mean", "padding_side": "right"},  # positions are counted from the left
)
