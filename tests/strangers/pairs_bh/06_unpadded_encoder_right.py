"""An encoder that takes the padding out: the real tokens of all rows run as one packed sequence (cu_seqlens)."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def unpad(tokens, attention_mask):
    """-> packed tokens [N], their places in the padded batch, lengths of the rows, cu_seqlens [B + 1]."""
    seqlens = attention_mask.sum(dim=-1)
    indices = torch.nonzero(attention_mask.flatten(), as_tuple=False).flatten()
    cu_seqlens = F.pad(torch.cumsum(seqlens, dim=0), (1, 0))
    return tokens.flatten()[indices], indices, seqlens, cu_seqlens


class PackedAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.Wo = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden, same_document):
        q, k, v = self.Wqkv(hidden).view(-1, 3, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        scores = torch.einsum("hnk,hmk->hnm", q, k) * self.head_dim**-0.5
        probs = scores.masked_fill(~same_document, float("-inf")).softmax(dim=-1)
        return self.Wo(torch.einsum("hnm,hmk->nhk", probs, v).flatten(1))


class PackedLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.attn = PackedAttention(hidden_size, num_heads)
        self.Wi, self.Wo = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)

    def forward(self, hidden, same_document):
        hidden = hidden + self.attn(self.attn_norm(hidden), same_document)
        return hidden + self.Wo(F.gelu(self.Wi(self.mlp_norm(hidden))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            [PackedLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)]
        )
        self.final_norm = nn.LayerNorm(hidden_size)

    def sinusoids(self, positions, like):
        width = like.size(-1)
        inv = torch.exp(torch.arange(0, width, 2, device=like.device, dtype=torch.float64) * -(math.log(1e4) / width))
        angles = positions.to(torch.float64)[:, None] * inv
        table = angles.new_zeros(len(positions), width)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()[:, : width // 2]
        return table.to(like.dtype)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        packed, indices, seqlens, cu_seqlens = unpad(input_ids, attention_mask)
        document = torch.repeat_interleave(torch.arange(batch, device=input_ids.device), seqlens)
        same_document = document[:, None] == document[None, :]
        position_ids = torch.arange(len(packed), device=input_ids.device) - cu_seqlens[document]
        hidden = self.embeddings(packed)
        hidden = hidden + self.sinusoids(position_ids, hidden)
        for layer in self.layers:
            hidden = layer(hidden, same_document)
        hidden = self.final_norm(hidden)
        output = hidden.new_zeros(batch * length, hidden.size(-1)).index_copy(0, indices, hidden)
        return output.view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False, "positions": "sinusoidal", "layout": "interleaved", "padding_side": "both", "norm": "layer",
        "norm_placement": "pre", "final_norm": True, "activation": "gelu",
    },
)
