"""ELECTRA's discriminator: narrow embeddings, and for every token whether it was replaced."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAD = 0


class ElectraEmbeddings(nn.Module):
    def __init__(self, vocab_size, embedding_size, max_positions, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, embedding_size, padding_idx=PAD)
        self.position_embeddings = nn.Embedding(max_positions, embedding_size)
        self.LayerNorm = nn.LayerNorm(embedding_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        length = input_ids.size(1)
        if length > self.position_embeddings.num_embeddings:
            raise ValueError(f"{length} tokens, {self.position_embeddings.num_embeddings} positions")
        position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        return self.dropout(self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids)))


class ElectraSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads, self.head_size, self.p = num_heads, hidden_size // num_heads, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, mask):
        def split(t):
            return t.view(x.size(0), x.size(1), self.num_heads, self.head_size).transpose(1, 2)

        scores = split(self.query(x)) @ split(self.key(x)).transpose(2, 3) * self.head_size**-0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        value = split(self.value(x))
        probs = F.dropout(scores.softmax(-1).to(value.dtype), self.p, self.training)
        return (probs @ value).transpose(1, 2).reshape(x.shape)


class ElectraLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.self_attention = ElectraSelfAttention(hidden_size, num_heads, dropout)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.norm_attention = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.norm_output = nn.LayerNorm(hidden_size, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norm_attention(x + self.dropout(self.dense(self.self_attention(x, mask))))
        return self.norm_output(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class ElectraForPreTraining(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, intermediate_size, max_positions, dropout):
        super().__init__()
        embedding_size = max(hidden_size // 2, 4)
        self.embeddings = ElectraEmbeddings(vocab_size, embedding_size, max_positions, dropout)
        self.embeddings_project = nn.Linear(embedding_size, hidden_size)
        self.layers = nn.ModuleList(
            [ElectraLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )
        self.head_dense = nn.Linear(hidden_size, hidden_size)
        self.head_prediction = nn.Linear(hidden_size, 1)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)

    def forward(self, input_ids, attention_mask=None):
        """The logit of "replaced", [batch, length, 1]."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        mask = attention_mask.bool()[:, None, None, :]
        x = self.embeddings_project(self.embeddings(input_ids))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head_prediction(F.gelu(self.head_dense(x)))


subject = Subject(
    kind="encoder",
    name="ELECTRA",
    build=lambda c: ElectraForPreTraining(
        c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "tied": False,
        "embedding_scale": False,
        "padding_idx": PAD,
        "init": "other",
        "structure": "other",
        "padding_side": "right",
        "beyond_max_len": "error",
        "memory": "quadratic",
    },
)
