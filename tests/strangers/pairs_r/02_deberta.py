"""DeBERTa encoder (He et al. 2021), config class and all: content-to-content, content-to-position, position-to-content."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject


@dataclass
class DebertaConfig:
    vocab_size: int = 11
    hidden_size: int = 8
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 20
    max_relative_positions: int = 16
    centred: bool = True


class DisentangledSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.query_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.key_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.value_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def transpose_for_scores(self, x):
        return x.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(-3, -2)

    def forward(self, hidden_states, attention_mask, rel_embeddings):
        query, key, value = (
            self.transpose_for_scores(proj(hidden_states)) for proj in (self.query_proj, self.key_proj, self.value_proj)
        )
        scores = query @ key.transpose(-1, -2) + self.disentangled_bias(query, key, rel_embeddings)
        scores = scores / query.shape[-1] ** 0.5
        visible = attention_mask[:, None, None, :]
        probs = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~visible, 0.0)
        return self.dense((probs @ value).transpose(1, 2).flatten(2))

    def disentangled_bias(self, query, key, rel_embeddings):
        length, k = query.shape[-2], self.config.max_relative_positions
        span = min(length, k)
        ids = torch.arange(length, device=query.device)
        delta = (ids[:, None] - ids[None, :] + span).clamp(0, 2 * span - 1).expand(*query.shape[:2], -1, -1)
        start = k - span if self.config.centred else 0
        rel = rel_embeddings[start : start + 2 * span]
        pos_key, pos_query = self.transpose_for_scores(self.key_proj(rel)), self.transpose_for_scores(self.query_proj(rel))
        c2p = (query @ pos_key.transpose(-1, -2)).gather(-1, delta)
        p2c = (key @ pos_query.transpose(-1, -2)).gather(-1, delta).transpose(-1, -2)
        return c2p + p2c


class DebertaLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = DisentangledSelfAttention(config)
        self.attention_norm, self.output_norm = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x, attention_mask, rel_embeddings):
        x = self.attention_norm(x + self.attention(x, attention_mask, rel_embeddings))
        return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))


class DebertaModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rel_embeddings = nn.Embedding(2 * config.max_relative_positions, config.hidden_size)
        self.layer = nn.ModuleList([DebertaLayer(config) for _ in range(config.num_hidden_layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        x = self.word_embeddings(input_ids)
        for layer in self.layer:
            x = layer(x, attention_mask.bool(), self.rel_embeddings.weight)
        return x


def subject(centred):
    return Subject(
        kind="encoder",
        name="DeBERTa",
        build=lambda c: DebertaModel(
            DebertaConfig(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, centred=centred)
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False,
            "positions": "relative",
            "norm": "layer",
            "norm_placement": "post",
            "activation": "gelu",
            "padding_side": "both",
        },
    )


right, wrong = subject(True), subject(False)
WHAT = "The table of relative embeddings is cut to its first 2*span rows instead of the 2*span rows around its middle."
CAUSE = (
    "In disentangled_bias a sequence shorter than max_relative_positions takes the wrong slice of rel_embeddings: row 'distance 0' "
    "is then number span and not number k, so one and the same distance has another embedding for every sequence length, and padding changes real outputs."
)
