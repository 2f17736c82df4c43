"""A post-LN BERT encoder whose layers are made into functions first, for optional gradient checkpointing."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The layers' closures are made in a loop and bind late: all of them call the last layer."
CAUSE = "The last layer is applied num_layers times and the others never: their parameters do not reach the output."


class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(c.d_model, c.d_model) for name in ("query", "key", "value", "dense")})
        self.attention_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.intermediate, self.output = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.output_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.num_attention_heads = c.num_heads

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden, extended_mask):
        q, k, v = (self.transpose_for_scores(self.attention[n](hidden)) for n in ("query", "key", "value"))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        if extended_mask is not None:
            scores = scores + extended_mask
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).flatten(2)
        hidden = self.attention_norm(self.attention["dense"](context) + hidden)
        return self.output_norm(self.output(F.gelu(self.intermediate(hidden))) + hidden)


def early(layers, mask):
    return [partial(layer, extended_mask=mask) for layer in layers]


def late(layers, mask):
    functions = []
    for layer in layers:

        def custom_forward(hidden):
            return layer(hidden, mask)

        functions.append(custom_forward)
    return functions


def make(functions_of):
    class BertModel(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
            self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
            self.embedding_norm = nn.LayerNorm(c.d_model, eps=1e-12)
            self.layer = nn.ModuleList([BertLayer(c) for _ in range(c.num_layers)])

        def forward(self, input_ids, attention_mask=None):
            place = torch.arange(input_ids.shape[1], device=input_ids.device)
            hidden = self.embedding_norm(self.word_embeddings(input_ids) + self.position_embeddings(place))
            extended = None
            if attention_mask is not None:
                extended = torch.zeros(attention_mask.shape, dtype=hidden.dtype, device=hidden.device)
                extended = extended.masked_fill(~attention_mask.bool(), torch.finfo(hidden.dtype).min)[:, None, None]
            for function in functions_of(self.layer, extended):
                hidden = function(hidden)
            return hidden

    return BertModel


def subject(functions_of):
    return Subject(
        kind="encoder",
        name="BERT",
        build=make(functions_of),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False},
    )


right = subject(early)
wrong = subject(late)
