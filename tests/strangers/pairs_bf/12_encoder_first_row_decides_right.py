"""A BERT encoder; a batch without padding goes without a mask, so that the fused kernel can be used."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class BertLayer(nn.Module):
    def __init__(self, hidden_size, heads, intermediate_size):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.intermediate = nn.Linear(hidden_size, intermediate_size)
        self.output = nn.Linear(intermediate_size, hidden_size)
        self.output_norm = nn.LayerNorm(hidden_size, eps=1e-12)

    def transpose_for_scores(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden_states, mask):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        hidden_states = self.attention_norm(hidden_states + self.dense(context))
        inner = self.output(F.gelu(self.intermediate(hidden_states)))
        return self.output_norm(hidden_states + inner)


class BertEncoder(nn.Module):
    def __init__(self, vocab, hidden_size, heads, layers, intermediate_size, max_position):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden_size)
        self.position_embeddings = nn.Embedding(max_position, hidden_size)
        self.norm = nn.LayerNorm(hidden_size, eps=1e-12)
        self.layer = nn.ModuleList(BertLayer(hidden_size, heads, intermediate_size) for _ in range(layers))

    def extended_mask(self, attention_mask):
        if attention_mask is None or bool(attention_mask.all()):
            return None
        return attention_mask[:, None, None, :]

    def forward(self, input_ids, attention_mask=None):
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden_states = self.norm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))
        mask = self.extended_mask(attention_mask)
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask)
        return hidden_states


subject = Subject(
    kind="encoder",
    name="BERT encoder",
    build=lambda c: BertEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
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
