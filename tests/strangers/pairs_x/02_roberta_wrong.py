WHAT = "Positions start at padding_idx (row 1, the zero row of padding), not at padding_idx + 1 (line 26)."
"""RoBERTa (Liu et al. 2019): BERT whose positions start behind the padding index, as in fairseq."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAD = 1


class RobertaEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden, max_len, dropout):
        super().__init__()
        self.padding_idx = PAD
        self.word_embeddings = nn.Embedding(vocab_size, hidden, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(max_len + PAD + 1, hidden, padding_idx=PAD)
        self.token_type_embeddings = nn.Embedding(1, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def position_ids(self, mask):
        """Padding gets padding_idx, real tokens are counted on from there."""
        mask = mask.long()
        return (mask.cumsum(1) - 1) * mask + self.padding_idx

    def forward(self, input_ids, mask):
        x = self.word_embeddings(input_ids)
        x = x + self.position_embeddings(self.position_ids(mask))
        x = x + self.token_type_embeddings.weight[0]
        return self.dropout(self.LayerNorm(x))


class RobertaLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate, dropout):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-5)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=1e-5)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x, mask):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context = self.dropout(scores.softmax(dim=-1)) @ v
        return self.attention_output(context.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask):
        x = self.attention_norm(x + self.dropout(self.attend(x, mask)))
        y = self.output(F.gelu(self.intermediate(x)))
        return self.output_norm(x + self.dropout(y))


class Roberta(nn.Module):
    def __init__(self, vocab_size, hidden, heads, layers, intermediate, max_len, dropout):
        super().__init__()
        self.embeddings = RobertaEmbeddings(vocab_size, hidden, max_len, dropout)
        self.layers = nn.ModuleList([RobertaLayer(hidden, heads, intermediate, dropout) for _ in range(layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = attention_mask.bool()
        x = self.embeddings(input_ids, mask)
        for layer in self.layers:
            x = layer(x, mask)
        return x


subject = Subject(
    kind="encoder",
    name="RoBERTa",
    build=lambda c: Roberta(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": 2,
        "padding_idx": 1,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
        "padding_side": "both",
    },
)
