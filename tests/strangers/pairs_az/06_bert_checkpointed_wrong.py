WHAT = "the checkpointed path of training calls the layer without the attention mask: padding is attended to in train mode (line 65)."
"""A BERT in the style of Hugging Face, that recomputes its layers in training to save memory."""

import math
from typing import Optional

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class BertSelfAttention(nn.Module):
    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask: Optional[torch.Tensor] = None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.flatten(2)


class BertLayer(nn.Module):
    def __init__(self, hidden_size, num_attention_heads, intermediate_size):
        super().__init__()
        self.attention = BertSelfAttention(hidden_size, num_attention_heads)
        self.attention_output = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def forward(self, hidden_states, attention_mask: Optional[torch.Tensor] = None):
        attended = self.attention_output(self.attention(hidden_states, attention_mask))
        hidden_states = self.attention_norm(attended + hidden_states)
        expanded = nn.functional.gelu(self.intermediate(hidden_states))
        return self.output_norm(self.output(expanded) + hidden_states)


class BertEncoder(nn.Module):
    def __init__(self, num_hidden_layers, *sizes):
        super().__init__()
        self.layer = nn.ModuleList([BertLayer(*sizes) for _ in range(num_hidden_layers)])
        self.gradient_checkpointing = True

    def forward(self, hidden_states, attention_mask=None):
        for layer_module in self.layer:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(
                    layer_module.__call__,
                    hidden_states,
                    use_reentrant=False,
                )
            else:
                hidden_states = layer_module(hidden_states, attention_mask)
        return hidden_states


class BertModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.embedding_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.encoder = BertEncoder(c.num_layers, c.d_model, c.num_heads, c.d_ff)

    def forward(self, input_ids, attention_mask=None):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        embeddings = self.embedding_norm(embeddings)
        extended = None
        if attention_mask is not None:
            extended = (~attention_mask.bool())[:, None, None, :].to(embeddings.dtype)
            extended = extended * torch.finfo(embeddings.dtype).min
        return self.encoder(embeddings, extended)


subject = Subject(
    kind="encoder",
    name="checkpointed BERT",
    build=BertModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
    },
)
