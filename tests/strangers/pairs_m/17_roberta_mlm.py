"""zoo/PR 240: RoBERTa with its masked-language-model head, weights tied, truncated normal initialisation."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Embedding and output matrix are tied before the initialisation gives the embedding a new parameter."
CAUSE = (
    "tie_weights runs first and init_weights then assigns a new nn.Parameter to the embedding, so the head keeps the "
    "old matrix: the two are separate parameters with separate gradients though the model is meant to be tied."
)


@dataclass
class RobertaConfig:
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    initializer_range: float = 0.02


class RobertaLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size)
        self.dense = nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.ln_attention = nn.LayerNorm(cfg.hidden_size)
        self.intermediate = nn.Linear(cfg.hidden_size, cfg.intermediate_size)
        self.output = nn.Linear(cfg.intermediate_size, cfg.hidden_size)
        self.ln_output = nn.LayerNorm(cfg.hidden_size)

    def forward(self, x, visible):
        heads = self.qkv(x).unflatten(-1, (3, self.cfg.num_attention_heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if visible is not None:
            scores = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.ln_attention(x + self.dense(y))
        return self.ln_output(x + self.output(nn.functional.gelu(self.intermediate(x))))


class RobertaForMaskedLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.word_embeddings = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.position_embeddings = nn.Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        self.layer_norm = nn.LayerNorm(cfg.hidden_size)
        self.layers = nn.ModuleList(RobertaLayer(cfg) for _ in range(cfg.num_hidden_layers))
        self.head_dense = nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.head_norm = nn.LayerNorm(cfg.hidden_size)
        self.decoder = nn.Linear(cfg.hidden_size, cfg.vocab_size)
        self.post_init()

    def post_init(self):
        self.init_weights()
        self.tie_weights()

    def tie_weights(self):
        self.decoder.weight = self.word_embeddings.weight

    def init_weights(self):
        std = self.cfg.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        for table in (self.word_embeddings, self.position_embeddings):
            table.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty_like(table.weight), std=std))

    def forward(self, input_ids, attention_mask=None):
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.layer_norm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x, attention_mask)
        return self.decoder(self.head_norm(nn.functional.gelu(self.head_dense(x))))


class RobertaForMaskedLMTiedFirst(RobertaForMaskedLM):
    def post_init(self):
        self.tie_weights()
        self.init_weights()


def subject(cls):
    return Subject(
        kind="encoder",
        name=cls.__name__,
        build=lambda c: cls(
            RobertaConfig(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len)
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False, "tied": True, "output_bias": True, "positions": "learned", "norm_placement": "post",
            "padding_side": "right",
        },
    )  # fmt: skip


right, wrong = subject(RobertaForMaskedLM), subject(RobertaForMaskedLMTiedFirst)
