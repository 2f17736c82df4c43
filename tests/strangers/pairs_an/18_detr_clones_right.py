"""The decoder of DETR: object queries look at each other and at the features of an image."""
import copy
import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import Subject

MAX_QUERIES = 256


def _get_clones(module, N):
    return nn.ModuleList([copy.deepcopy(module) for i in range(N)])


def sine_embedding(length, dim, like):
    """Positions of the features along the (flattened) image."""
    half = (dim + 1) // 2
    rate = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float64, device=like.device) / half)
    angle = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :dim].to(like.dtype)


class TransformerDecoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward=2048, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.linear1 = nn.Linear(d_model, dim_feedforward)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.dropout1, self.dropout2, self.dropout3 = nn.Dropout(dropout), nn.Dropout(dropout), nn.Dropout(dropout)

    @staticmethod
    def with_pos_embed(tensor, pos: Optional[Tensor]):
        return tensor if pos is None else tensor + pos

    def forward(self, tgt, memory, memory_key_padding_mask=None, pos=None, query_pos=None):
        q = k = self.with_pos_embed(tgt, query_pos)
        tgt2 = self.self_attn(q, k, value=tgt, need_weights=False)[0]
        tgt = self.norm1(tgt + self.dropout1(tgt2))
        tgt2 = self.multihead_attn(
            query=self.with_pos_embed(tgt, query_pos), key=self.with_pos_embed(memory, pos), value=memory,
            key_padding_mask=memory_key_padding_mask, need_weights=False,
        )[0]
        tgt = self.norm2(tgt + self.dropout2(tgt2))
        tgt2 = self.linear2(self.dropout(F.relu(self.linear1(tgt))))
        return self.norm3(tgt + self.dropout3(tgt2))


class TransformerDecoder(nn.Module):
    def __init__(self, decoder_layer, num_layers, d_model):
        super().__init__()
        self.layers = _get_clones(decoder_layer, num_layers)
        self.query_embed = nn.Embedding(MAX_QUERIES, d_model)
        self._reset_parameters()

    def _reset_parameters(self):
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, tgt, memory, memory_key_padding_mask=None):
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)  # NxLxC to LxNxC
        pos = sine_embedding(memory.shape[0], memory.shape[2], memory)[:, None]
        query_pos = self.query_embed(torch.arange(tgt.shape[0], device=tgt.device))[:, None]
        for layer in self.layers:
            tgt = layer(tgt, memory, memory_key_padding_mask, pos, query_pos)
        return tgt.transpose(0, 1)


def build(c):
    layer = TransformerDecoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout)
    return TransformerDecoder(layer, c.num_layers, c.d_model)


subject = Subject(
    kind="cross_attention",
    name="DETR's decoder",
    build=build,
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, None if memory_mask is None else ~memory_mask),
    declares={
        "causal": False, "positions": "other", "norm": "layer", "norm_placement": "post", "activation": "relu",
        "bias": True, "residual": True, "shared_layers": False, "structure": "other", "padding_side": "right",
    },
)
