WHAT = "the sequence is read one position too late: the index of the last token lacks its - 1, which the clamp hides for full rows, so that a padded row is classified from its first padding (line 66)."
"""GPT2ForSequenceClassification, rewritten without the library: the last real token is classified."""
import torch
from torch import nn

from veriformer.properties import Subject


class GPT2Attention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, hidden_size // n_head
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, bias):
        batch, length, width = hidden_states.shape
        query, key, value = self.c_attn(hidden_states).split(width, dim=-1)
        shape = (batch, length, self.n_head, self.head_dim)
        query, key, value = (t.view(shape).transpose(1, 2) for t in (query, key, value))
        attn_weights = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5
        attn_weights = torch.softmax(attn_weights + bias, dim=-1)
        attn_output = torch.matmul(attn_weights, value).transpose(1, 2).reshape(batch, length, width)
        return self.c_proj(attn_output)


class GPT2Block(nn.Module):
    def __init__(self, hidden_size, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size)
        self.attn = GPT2Attention(hidden_size, n_head)
        self.ln_2 = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, n_inner), nn.GELU(approximate="tanh"), nn.Linear(n_inner, hidden_size)
        )

    def forward(self, hidden_states, bias):
        hidden_states = hidden_states + self.attn(self.ln_1(hidden_states), bias)
        return hidden_states + self.mlp(self.ln_2(hidden_states))


class GPT2ForSequenceClassification(nn.Module):
    def __init__(self, vocab_size, n_positions, hidden_size, n_head, n_layer, n_inner, num_labels):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(n_positions, hidden_size)
        self.h = nn.ModuleList([GPT2Block(hidden_size, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.score = nn.Linear(hidden_size, num_labels, bias=False)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        device = input_ids.device
        hidden_states = self.wte(input_ids) + self.wpe(torch.arange(length, device=device))
        seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :]
        lowest = torch.finfo(hidden_states.dtype).min
        bias = torch.zeros(seen.shape, dtype=hidden_states.dtype, device=device).masked_fill(~seen, lowest)
        for block in self.h:
            hidden_states = block(hidden_states, bias)
        logits = self.score(self.ln_f(hidden_states))
        if attention_mask is None:
            last = torch.full((batch,), length - 1, device=device)
        else:
            last = attention_mask.long().sum(-1).clamp(max=input_ids.shape[-1] - 1)
        return logits[torch.arange(batch, device=device), last]


subject = Subject(
    kind="classifier",
    name="GPT2ForSequenceClassification",
    build=lambda c: GPT2ForSequenceClassification(
        c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "last",
        "padding_side": "right",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "output_bias": False,
    },
)
