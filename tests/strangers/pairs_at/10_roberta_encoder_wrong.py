WHAT = 'Where no mask is given positions start at 0 instead of at PADDING_IDX + 1 (`first = 0`), so that they use other rows of the table (the second token the padding row) than the path with a mask does.'
import torch
from torch import nn

from veriformer.properties import Subject

PADDING_IDX = 1  # of the table of positions; the first real position is PADDING_IDX + 1


class RobertaEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden_size, max_len, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_len + PADDING_IDX + 1, hidden_size, padding_idx=PADDING_IDX)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def create_position_ids(self, input_ids, attention_mask):
        if attention_mask is None:
            first = 0
            return torch.arange(first, first + input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = attention_mask.long()
        return mask.cumsum(dim=1) * mask + PADDING_IDX

    def forward(self, input_ids, attention_mask=None):
        position_ids = self.create_position_ids(input_ids, attention_mask)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class RobertaLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output_dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).permute(0, 2, 1, 3)

    def forward(self, hidden_states, extended_mask):
        q, k, v = (self.transpose_for_scores(f(hidden_states)) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        if extended_mask is not None:
            scores = scores + extended_mask
        probs = self.dropout(scores.softmax(dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).flatten(2)
        hidden_states = self.attention_norm(hidden_states + self.dropout(self.output_dense(context)))
        inner = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(hidden_states + self.dropout(self.output(inner)))


class RobertaModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = RobertaEmbeddings(c.vocab_size, c.d_model, c.max_len, c.dropout)
        self.layer = nn.ModuleList(
            [RobertaLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)]
        )

    def forward(self, input_ids, attention_mask=None):
        hidden_states = self.embeddings(input_ids, attention_mask)
        extended_mask = None
        if attention_mask is not None:
            extended_mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype)
            extended_mask = extended_mask.masked_fill(~attention_mask, torch.finfo(hidden_states.dtype).min)
            extended_mask = extended_mask[:, None, None, :]
        for layer in self.layer:
            hidden_states = layer(hidden_states, extended_mask)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="RoBERTa",
    build=RobertaModel,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": PADDING_IDX + 1,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "padding_side": "both",
    },
)
