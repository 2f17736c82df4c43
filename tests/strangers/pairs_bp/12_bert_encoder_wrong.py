WHAT = "On the inputs_embeds path the embeddings are returned before the position embeddings are added (lines 18 and after), so the same sequence given as embeddings has no order."
import math

import torch
from torch import nn

from veriformer.properties import Subject


class BertEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_position_embeddings):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_position_embeddings, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-12)

    def forward(self, input_ids=None, inputs_embeds=None):
        if inputs_embeds is not None:
            return self.LayerNorm(inputs_embeds)
        position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.LayerNorm(embeddings)


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_mask=None):
        q, k, v = self.split(self.query(hidden_states)), self.split(self.key(hidden_states)), self.split(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_size)
        if extended_mask is not None:
            scores = scores.masked_fill(~extended_mask, torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).flatten(2)
        hidden_states = self.attention_norm(hidden_states + self.attention_output(context))
        inner = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.output(inner))


class BertModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = BertEmbeddings(c.vocab_size, c.d_model, c.max_len)
        self.layer = nn.ModuleList([BertLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        hidden_states = self.embeddings(input_ids=input_ids, inputs_embeds=inputs_embeds)
        extended_mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended_mask)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="BERT",
    build=BertModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask=attention_mask),
    embed=lambda m, embeddings, attention_mask=None: m(inputs_embeds=embeddings, attention_mask=attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "padding_side": "right",
    },
)
