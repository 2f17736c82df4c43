"""A BERT in the manner of Hugging Face."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "the second residual connection takes the input of the layer instead of the output of the attention sublayer"
CAUSE = (
    "The residual connection around the feed-forward network adds the layer's input instead of the attention "
    "sublayer's output, so that the skip goes around the attention and the stream is taken from the wrong place."
)


class BertEmbeddings(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.LayerNorm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, input_ids):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids)))


class BertSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_heads, self.head_size = c.num_heads, c.d_model // c.num_heads
        self.query, self.key, self.value = (nn.Linear(c.d_model, c.d_model) for _ in range(3))
        self.dropout = nn.Dropout(c.dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_size)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:2], -1)


class BertOutput(nn.Module):
    def __init__(self, c, size):
        super().__init__()
        self.dense = nn.Linear(size, c.d_model)
        self.LayerNorm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = BertSelfAttention(c)
        self.attention_output = BertOutput(c, c.d_model)
        self.intermediate = nn.Linear(c.d_model, c.d_ff)
        self.output = BertOutput(c, c.d_ff)

    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention_output(self.attention(hidden_states, attention_mask), hidden_states)
        intermediate = nn.functional.gelu(self.intermediate(attention_output))
        return self.output(intermediate, attention_output)


class BertBlock(BertLayer):
    def forward(self, hidden_states, attention_mask):
        attention_output = self.attention_output(self.attention(hidden_states, attention_mask), hidden_states)
        intermediate = nn.functional.gelu(self.intermediate(attention_output))
        return self.output(intermediate, hidden_states)


class BertModel(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.embeddings = BertEmbeddings(c)
        self.layer = nn.ModuleList([layer(c) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        extended = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        hidden_states = self.embeddings(input_ids)
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended)
        return hidden_states


def subject(layer):
    return Subject(
        kind="encoder",
        name="BERT",
        build=lambda c: BertModel(c, layer),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={
            "causal": False,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "post",
            "residual": True,
            "activation": "gelu",
            "padding_side": "right",
        },
    )


right = subject(BertLayer)
wrong = subject(BertBlock)
