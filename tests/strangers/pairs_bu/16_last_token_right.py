import torch
from torch import nn

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.dense = (nn.Linear(dim, dim) for _ in range(4))
        self.wi, self.wo = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, allowed):
        h = self.norm_a(hidden_states)
        shape = (*h.shape[:2], self.heads, -1)
        q, k, v = (f(h).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2)
        hidden_states = hidden_states + self.dropout(self.dense(context))
        return hidden_states + self.dropout(self.wo(nn.functional.gelu(self.wi(self.norm_f(hidden_states)))))


class GPTForSequenceClassification(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.wpe = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.score = nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        T = input_ids.shape[1]
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        hidden = self.wte(input_ids) + self.wpe(position_ids)
        allowed = torch.ones(T, T, dtype=torch.bool).tril() & attention_mask[:, None]
        for layer in self.layers:
            hidden = layer(hidden, allowed)
        last = (attention_mask.long() * torch.arange(T)).argmax(-1)
        rows = torch.arange(input_ids.shape[0])
        return self.score(self.norm(hidden)[rows, last])


subject = Subject(
    kind="classifier",
    build=GPTForSequenceClassification,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "last", "padding_side": "both", "positions": "learned", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "gelu", "output_bias": False,
    },
)
