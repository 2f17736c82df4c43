"""A masked language model on torch's own encoder, with the loss that it is trained by."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

IGNORE = -100


class MaskedLM(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, depth: int, hidden: int, max_len: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(max_len, width) * 0.1)
        layer = nn.TransformerEncoderLayer(
            width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.vocab = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.places[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=None if keep is None else ~keep)
        return self.vocab(x)

    def loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self(ids)
        nll = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
        counted = labels.ne(IGNORE)
        return nll.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="encoder",
    name="masked LM",
    build=lambda c: MaskedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
        "ignore_index": IGNORE,
        "shifts_labels": False,
        "plain_loss": True,
        "empty_loss": "zero",
    },
)
