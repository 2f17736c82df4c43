"""DeBERTa: attention from content to content, from content to position and from position to content."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

K = 8  # distances from -K to K - 1 have embeddings of their own


def build_relative_position(length, device):
    """delta(i, j) of the paper: i - j, moved to 0 .. 2K - 1; what is further away shares the rows at both ends."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :] + K).clamp(0, 2 * K - 1)


class DisentangledSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads, dropout):
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.query_proj = nn.Linear(hidden_size, hidden_size)
        self.key_proj = nn.Linear(hidden_size, hidden_size)
        self.value_proj = nn.Linear(hidden_size, hidden_size)
        self.pos_key_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pos_query_proj = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x):
        return x.unflatten(-1, (self.num_heads, self.head_size)).transpose(-2, -3)

    def disentangled_bias(self, query, key, rel_embeddings):
        batch, heads, length, _ = query.shape
        delta = build_relative_position(length, query.device)
        pos_key = self.heads(self.pos_key_proj(rel_embeddings))  # heads, 2K, head_size
        pos_query = self.heads(self.pos_query_proj(rel_embeddings))

        # content to position: Qc_i . Kr_delta(i, j)
        c2p = torch.matmul(query, pos_key.transpose(-1, -2))
        c2p = torch.gather(c2p, dim=-1, index=delta.expand(batch, heads, length, length))
        # position to content: Kc_j . Qr_delta(j, i)
        p2c = torch.matmul(key, pos_query.transpose(-1, -2))
        p2c = torch.gather(p2c, dim=-1, index=delta.expand(batch, heads, length, length))
        return c2p + p2c

    def forward(self, hidden_states, rel_embeddings, allowed):
        query = self.heads(self.query_proj(hidden_states))
        key = self.heads(self.key_proj(hidden_states))
        value = self.heads(self.value_proj(hidden_states))
        scores = torch.matmul(query, key.transpose(-1, -2)) + self.disentangled_bias(query, key, rel_embeddings)
        scores = scores / math.sqrt(3 * self.head_size)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0).to(value.dtype)
        return torch.matmul(self.dropout(probs), value).transpose(1, 2).flatten(2)


class DebertaLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size, dropout):
        super().__init__()
        self.attention = DisentangledSelfAttention(hidden_size, num_heads, dropout)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-7)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-7)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, rel_embeddings, allowed):
        attended = self.attention_output(self.attention(x, rel_embeddings, allowed))
        x = self.attention_norm(x + self.dropout(attended))
        return self.output_norm(x + self.dropout(self.output(nn.functional.gelu(self.intermediate(x)))))


class DebertaModel(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, intermediate_size, dropout=0.0):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.embedding_norm = nn.LayerNorm(hidden_size, eps=1e-7)
        self.dropout = nn.Dropout(dropout)
        self.rel_embeddings = nn.Embedding(2 * K, hidden_size)
        self.layer = nn.ModuleList(
            [DebertaLayer(hidden_size, num_heads, intermediate_size, dropout) for _ in range(num_layers)]
        )
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding_norm(self.word_embeddings(input_ids))
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            x = x * attention_mask.unsqueeze(-1).to(x.dtype)
        x = self.dropout(x)
        allowed = attention_mask.bool()[:, None, None, :]
        for layer in self.layer:
            x = layer(x, self.rel_embeddings.weight, allowed)
        return x


subject = Subject(
    kind="encoder",
    name="DeBERTa",
    build=lambda c: DebertaModel(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout),
    domain={"d_model": (16,), "num_heads": (2,)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "relative",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": 24**-0.5,
        "embedding_scale": False,
        "init": "other",
        "structure": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)
