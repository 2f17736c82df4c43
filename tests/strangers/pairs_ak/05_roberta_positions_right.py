"""RoBERTa, as ported from fairseq: positions are counted over real tokens, from padding_idx + 1 on."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RobertaEmbeddings(nn.Module):
    padding_idx = 1

    def __init__(self, vocab_size, hidden_size, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_len + self.padding_idx + 1, hidden_size, padding_idx=self.padding_idx)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-5)

    def create_position_ids(self, attention_mask):
        mask = attention_mask.long()
        return mask.cumsum(dim=1) * mask + self.padding_idx

    def forward(self, input_ids, attention_mask):
        position_ids = self.create_position_ids(attention_mask)
        return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))


class RobertaLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-5)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_attention_mask):
        query = self.transpose_for_scores(self.query(hidden_states))
        key = self.transpose_for_scores(self.key(hidden_states))
        value = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)) / self.head_size**0.5 + extended_attention_mask
        context = torch.matmul(scores.softmax(dim=-1), value).permute(0, 2, 1, 3).contiguous()
        context = context.view(hidden_states.shape)
        hidden_states = self.attention_norm(self.attention_output(context) + hidden_states)
        return self.output_norm(self.output(F.gelu(self.intermediate(hidden_states))) + hidden_states)


class RobertaModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = RobertaEmbeddings(c.vocab_size, c.d_model, c.max_len)
        self.layer = nn.ModuleList([RobertaLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden_states = self.embeddings(input_ids, attention_mask)
        dtype = hidden_states.dtype
        extended = (1.0 - attention_mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="roberta",
    build=RobertaModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "position_offset": 2, "norm": "layer", "norm_placement": "post",
        "activation": "gelu", "padding_side": "both",
    },
)
