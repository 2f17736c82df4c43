WHAT = "decoder and embedding are tied by .data: two parameters that share storage for a while, each with a gradient and an optimizer state of its own, and none shared after a deepcopy or a cast: line 55"
"""BERT with its masked language modelling head."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.attention_output = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim, eps=1e-12)
        self.intermediate, self.output = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.output_norm = nn.LayerNorm(dim, eps=1e-12)

    def transpose_for_scores(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, extended_mask):
        q, k, v = (self.transpose_for_scores(f(x)) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if extended_mask is not None:
            scores = scores + extended_mask
        context = (scores.softmax(dim=-1) @ v).permute(0, 2, 1, 3).flatten(2)
        x = self.attention_norm(x + self.attention_output(context))
        return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))


class BertForMaskedLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(max_len, dim)
        self.embedding_norm = nn.LayerNorm(dim, eps=1e-12)
        self.encoder = nn.ModuleList([BertLayer(dim, heads, ffn) for _ in range(layers)])
        self.transform = nn.Linear(dim, dim)
        self.transform_norm = nn.LayerNorm(dim, eps=1e-12)
        self.decoder = nn.Linear(dim, vocab)
        self.init_weights()
        self.tie_weights()

    def init_weights(self):
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight.data.normal_(0.0, 0.02)
            if isinstance(module, nn.Linear):
                module.bias.data.zero_()

    def tie_weights(self):
        self.decoder.weight.data = self.word_embeddings.weight.data

    def forward(self, input_ids, attention_mask=None):
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings.weight[: input_ids.size(1)]
        x = self.embedding_norm(x)
        extended = None
        if attention_mask is not None:
            extended = (~attention_mask.bool())[:, None, None, :].to(x.dtype) * torch.finfo(x.dtype).min
        for layer in self.encoder:
            x = layer(x, extended)
        return self.decoder(self.transform_norm(nn.functional.gelu(self.transform(x))))


subject = Subject(
    kind="encoder",
    name="BertForMaskedLM",
    build=lambda c: BertForMaskedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "tied": True,
        "padding_side": "right",
        "structure": "other",
    },
)
