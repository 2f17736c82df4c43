WHAT = "bucketize without right=True puts slot cu_seqlens[b], the first token of sequence b, into the sequence before it (line 17): packed sequences leak into one another and lose their first token."
"""BERT-like encoder, made free of padding: real tokens are packed into one row, and unpacked at the end."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(attention_mask):
    """Indices of the real tokens in the flat batch, cu_seqlens [B + 1], and the sequence that each belongs to."""
    lengths = attention_mask.sum(dim=1)
    indices = attention_mask.flatten().nonzero(as_tuple=True)[0]
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    slots = torch.arange(indices.numel(), device=indices.device)
    sequence = torch.bucketize(slots, cu_seqlens[1:])
    return indices, cu_seqlens, sequence


class PackedAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, same):
        total, width = x.shape
        q, k, v = self.Wqkv(x).view(total, 3, self.num_heads, width // self.num_heads).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        return self.out(y.transpose(0, 1).reshape(total, width))


class PackedLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.attention = PackedAttention(hidden_size, num_heads)
        self.norm1 = nn.LayerNorm(hidden_size)
        self.up, self.down = nn.Linear(hidden_size, intermediate_size), nn.Linear(intermediate_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)

    def forward(self, x, same):
        x = self.norm1(x + self.attention(x, same))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class UnpaddedBert(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_heads, num_layers, intermediate_size, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(max_len, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.layers = nn.ModuleList(
            PackedLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)
        )

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        attention_mask = attention_mask.long()
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)

        indices, _, sequence = unpad(attention_mask)
        x = self.word_embeddings(input_ids.flatten()[indices])
        x = self.norm(x + self.position_embeddings(position_ids.flatten()[indices]))
        same = sequence[:, None] == sequence[None, :]
        for layer in self.layers:
            x = layer(x, same)
        padded = x.new_zeros(batch * length, x.shape[-1]).index_copy(0, indices, x)
        return padded.view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="BERT without padding",
    build=lambda c: UnpaddedBert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
        "max_len": 32,
    },
)
