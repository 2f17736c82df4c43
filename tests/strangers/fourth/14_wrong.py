"""BERT with the head that predicts masked tokens."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class BertConfig:
    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    hidden_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02


class BertEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, token_type_ids=None):
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.token_type_embeddings(token_type_ids)
        embeddings = embeddings + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class BertSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def transpose_for_scores(self, x):
        new_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(new_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores + attention_mask
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1).to(value_layer.dtype))
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.view(hidden_states.size())


class BertLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = BertSelfAttention(config)
        self.attention_output = nn.Linear(config.hidden_size, config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, attention_mask):
        attended = self.dropout(self.attention_output(self.attention(hidden_states, attention_mask)))
        hidden_states = self.attention_norm(hidden_states + attended)
        inner = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.dropout(self.output(inner)))


class BertForMaskedLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embeddings = BertEmbeddings(config)
        self.layer = nn.ModuleList([BertLayer(config) for _ in range(config.num_hidden_layers)])
        self.transform = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size),
            nn.GELU(),
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
        )
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = self.embeddings.word_embeddings.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()

    def get_extended_attention_mask(self, attention_mask, dtype):
        # [batch, length] to what is added to [batch, heads, from, to]
        extended_attention_mask = attention_mask[:, None, :, None].to(dtype)
        return (1.0 - extended_attention_mask) * torch.finfo(dtype).min

    def forward(self, input_ids, attention_mask=None, labels=None):
        if input_ids.size(1) > self.config.max_position_embeddings:
            raise ValueError(f"{input_ids.size(1)} tokens, positions for {self.config.max_position_embeddings}")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden_states = self.embeddings(input_ids)
        mask = self.get_extended_attention_mask(attention_mask, self.decoder.weight.dtype)
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        logits = self.decoder(self.transform(hidden_states))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.view(-1, self.config.vocab_size), labels.view(-1)), logits


subject = Subject(
    kind="encoder",
    name="BERT",
    build=lambda c: BertForMaskedLM(
        BertConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.d_model,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            intermediate_size=c.d_ff,
            max_position_embeddings=c.max_len,
            hidden_dropout_prob=c.dropout,
        )
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    loss=lambda model, tokens, labels: model(tokens, labels=labels)[0],
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "structure": "other",
        "padding_side": "right",
        "beyond_max_len": "error",
        "shifts_labels": False,
        "empty_loss": "nan",
        "memory": "quadratic",
    },
)
