"""zoo/PR 226: BERT for classification; the extended attention mask is made once a forward, and not in every layer."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The additive mask is memoised by its shape, so a later batch of the same shape is masked as the first one was."
CAUSE = (
    "extended_mask keeps what it made in a dict whose key is (batch, length, dtype, device) and not the content of the "
    "attention mask: a call with another mask of the same shape is given the padding of an earlier call, and the model "
    "has state between calls."
)


class BertConfig:
    def __init__(self, **sizes):
        self.layer_norm_eps = 1e-12
        self.__dict__.update(sizes)


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden, extended_mask):
        q, k, v = (self.transpose_for_scores(f(hidden)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        if extended_mask is not None:
            scores = scores + extended_mask
        context = torch.matmul(scores.softmax(dim=-1), v).permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(hidden.shape))


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = BertSelfAttention(config)
        self.norm_attention = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.norm_output = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden, extended_mask):
        hidden = self.norm_attention(hidden + self.attention(hidden, extended_mask))
        return self.norm_output(hidden + self.output(nn.functional.gelu(self.intermediate(hidden))))


class BertForClassification(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layer = nn.ModuleList([BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def extended_mask(self, attention_mask, dtype):
        blocked = ~attention_mask.bool()[:, None, None, :]
        return torch.zeros(blocked.shape, dtype=dtype, device=blocked.device).masked_fill(blocked, -10000.0)

    def forward(self, input_ids, attention_mask=None):
        place = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.norm(self.word(input_ids) + self.place(place))
        extended = None if attention_mask is None else self.extended_mask(attention_mask, hidden.dtype)
        for layer in self.layer:
            hidden = layer(hidden, extended)
        return self.classifier(torch.tanh(self.pooler(hidden[:, 0])))


class BertForClassificationMemo(BertForClassification):
    def __init__(self, config):
        super().__init__(config)
        self._masks = {}

    def extended_mask(self, attention_mask, dtype):
        key = (*attention_mask.shape, dtype, attention_mask.device)
        if key not in self._masks:
            self._masks[key] = super().extended_mask(attention_mask, dtype)
        return self._masks[key]


def subject(cls):
    return Subject(
        kind="classifier",
        name=cls.__name__,
        build=lambda c: cls(
            BertConfig(
                vocab_size=c.vocab_size, hidden_size=c.d_model, num_attention_heads=c.num_heads, num_labels=c.num_classes,
                intermediate_size=c.d_ff, num_hidden_layers=c.num_layers, max_position_embeddings=c.max_len,
            )
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"pooling": "cls", "padding_side": "right"},
    )  # fmt: skip


right, wrong = subject(BertForClassification), subject(BertForClassificationMemo)
