WHAT = 'tied by .data only: decoder.weight and word_embeddings.weight are two parameters on one storage, with two gradients and two optimizer states, and every copy (to another dtype or device, deepcopy) parts them (line 59: self.decoder.weight.data = embedding.weight.data)'
"""BERT for masked language modelling, after the original code: embeddings with segments, post-norm, a tied decoder."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_position_embeddings, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.token_type_embeddings = nn.Embedding(2, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.size(1), dtype=torch.long, device=input_ids.device)
        token_type_ids = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x + self.token_type_embeddings(token_type_ids)))


class BertLayer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size, dropout):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.value, self.dense = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, extended_mask):
        q, k, v = (self.transpose_for_scores(f(x)) for f in (self.query, self.key, self.value))
        scores = q.matmul(k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        if extended_mask is not None:
            scores = scores + extended_mask
        context = self.dropout(scores.softmax(dim=-1)).matmul(v).permute(0, 2, 1, 3).reshape(x.shape)
        x = self.attention_norm(x + self.dropout(self.dense(context)))
        return self.output_norm(x + self.dropout(self.output(nn.functional.gelu(self.intermediate(x)))))


class BertLMPredictionHead(nn.Module):
    def __init__(self, hidden_size, embedding):
        super().__init__()
        self.transform = nn.Linear(hidden_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)
        # The output weights are the same as the input embeddings, but there is an output-only bias for each token.
        self.decoder = nn.Linear(hidden_size, embedding.num_embeddings)
        self.decoder.weight.data = embedding.weight.data
        nn.init.zeros_(self.decoder.bias)

    def forward(self, x):
        return self.decoder(self.LayerNorm(nn.functional.gelu(self.transform(x))))


class BertForMaskedLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = BertEmbeddings(c.vocab_size, c.d_model, c.max_len, c.dropout)
        self.layer = nn.ModuleList([BertLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)])
        self.apply(self._init_weights)
        self.cls = BertLMPredictionHead(c.d_model, self.embeddings.word_embeddings)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids)
        extended_mask = None
        if attention_mask is not None:
            hidden = ~attention_mask[:, None, None, :].bool()
            extended_mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
            extended_mask = extended_mask.masked_fill(hidden, float("-inf"))
        for layer in self.layer:
            x = layer(x, extended_mask)
        return self.cls(x)


subject = Subject(
    kind="encoder",
    name="BERT for masked language modelling",
    build=BertForMaskedLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "gelu",
        "bias": True, "output_bias": True, "tied": True, "padding_side": "right",
    },
)
