"""A causal language model's trunk with a classification head on the last real token."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.num_heads = num_heads
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden_states, mask):
        bsz, q_len, _ = hidden_states.shape
        qkv = self.qkv_proj(self.input_layernorm(hidden_states))
        q, k, v = qkv.view(bsz, q_len, 3, self.num_heads, -1).unbind(2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        attn = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).reshape(bsz, q_len, -1)
        hidden_states = hidden_states + self.o_proj(attn)
        mlp = self.down_proj(F.gelu(self.up_proj(self.post_attention_layernorm(hidden_states))))
        return hidden_states + mlp


class ForSequenceClassification(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(DecoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.score = nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, input_ids, attention_mask=None):
        bsz, q_len = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        causal = torch.ones(q_len, q_len, dtype=torch.bool, device=input_ids.device).tril()
        mask = causal[None, None] & attention_mask[:, None, None, :]
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        logits = self.score(self.norm(hidden_states))
        sequence_lengths = q_len - 1 - attention_mask.long().flip(-1).argmax(-1)
        return logits[torch.arange(bsz, device=logits.device), sequence_lengths]


subject = Subject(
    kind="classifier",
    name="GPT for classification",
    build=ForSequenceClassification,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "learned",
        "pooling": "last",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
    },
)
