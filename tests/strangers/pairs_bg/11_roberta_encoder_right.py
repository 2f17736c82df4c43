"""A small RoBERTa: positions count the real tokens and begin behind the padding index of their table."""

import torch
from torch import nn

from veriformer.properties import Subject

PADDING_IDX = 1


class RobertaEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_len + PADDING_IDX + 1, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size)

    def position_ids(self, input_ids, attention_mask=None):
        if attention_mask is None:
            seq_length = input_ids.size(1)
            ids = torch.arange(seq_length, device=input_ids.device) + PADDING_IDX + 1
            return ids.unsqueeze(0).expand(input_ids.shape)
        mask = attention_mask.long()
        return torch.cumsum(mask, dim=1) * mask + PADDING_IDX

    def forward(self, input_ids, attention_mask=None):
        positions = self.position_embeddings(self.position_ids(input_ids, attention_mask))
        return self.LayerNorm(self.word_embeddings(input_ids) + positions)


class RobertaLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size)

    def heads(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_mask=None):
        q, k, v = self.heads(self.query(hidden_states)), self.heads(self.key(hidden_states)), self.heads(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        if extended_mask is not None:
            scores = scores + extended_mask
        context = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).flatten(2)
        hidden_states = self.attention_norm(hidden_states + self.attention_output(context))
        return self.output_norm(hidden_states + self.output(nn.functional.gelu(self.intermediate(hidden_states))))


class RobertaModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = RobertaEmbeddings(c.vocab_size, c.d_model, c.max_len)
        self.layer = nn.ModuleList([RobertaLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        x = self.embeddings(input_ids, attention_mask)
        extended = None
        if attention_mask is not None:
            extended = (~attention_mask)[:, None, None, :].to(x.dtype) * torch.finfo(x.dtype).min
        for layer in self.layer:
            x = layer(x, extended)
        return x


subject = Subject(
    kind="encoder",
    name="small RoBERTa",
    build=RobertaModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
    },
)
