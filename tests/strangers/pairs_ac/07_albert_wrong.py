WHAT = "The initialisation, which runs after the tying, puts a new Parameter in place of each weight: decoder and word embeddings are no longer one parameter (line 77)."
"""ALBERT with its masked-LM head: factorised embeddings, one layer used num_layers times, tied decoder."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class AlbertEmbeddings(nn.Module):
    def __init__(self, vocab_size, embedding_size, max_position_embeddings):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, embedding_size)
        self.LayerNorm = nn.LayerNorm(embedding_size, eps=1e-12)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))


class AlbertLayer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size):
        super().__init__()
        self.heads, self.head_size = heads, hidden_size // heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.ffn = nn.Linear(hidden_size, intermediate_size)
        self.ffn_output = nn.Linear(intermediate_size, hidden_size)
        self.full_layer_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q, k, v = self.split(self.query(hidden_states)), self.split(self.key(hidden_states)), self.split(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_size)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).flatten(2)
        attended = self.attention_norm(hidden_states + self.dense(context))
        ffn = self.ffn_output(nn.functional.gelu(self.ffn(attended), approximate="tanh"))
        return self.full_layer_norm(ffn + attended)


class AlbertMLMHead(nn.Module):
    def __init__(self, hidden_size, embedding_size, vocab_size):
        super().__init__()
        self.dense = nn.Linear(hidden_size, embedding_size)
        self.LayerNorm = nn.LayerNorm(embedding_size, eps=1e-12)
        self.decoder = nn.Linear(embedding_size, vocab_size)

    def forward(self, x):
        return self.decoder(self.LayerNorm(nn.functional.gelu(self.dense(x), approximate="tanh")))


class AlbertForMaskedLM(nn.Module):
    initializer_range = 0.02

    def __init__(self, vocab_size, embedding_size, hidden_size, heads, layers, intermediate_size, max_positions):
        super().__init__()
        self.num_hidden_layers = layers
        self.embeddings = AlbertEmbeddings(vocab_size, embedding_size, max_positions)
        self.embedding_hidden_mapping_in = nn.Linear(embedding_size, hidden_size)
        self.albert_layer = AlbertLayer(hidden_size, heads, intermediate_size)
        self.predictions = AlbertMLMHead(hidden_size, embedding_size, vocab_size)
        self.predictions.decoder.weight = self.embeddings.word_embeddings.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(torch.randn_like(module.weight) * self.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embedding_hidden_mapping_in(self.embeddings(input_ids))
        for _ in range(self.num_hidden_layers):
            hidden_states = self.albert_layer(hidden_states, attention_mask)
        return self.predictions(hidden_states)


subject = Subject(
    kind="encoder",
    name="ALBERT",
    build=lambda c: AlbertForMaskedLM(c.vocab_size, 6, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": True,
        "tied": True,
        "shared_layers": True,
        "structure": "other",
        "padding_side": "right",
    },
)
