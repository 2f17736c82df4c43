# OPT after the fairseq code: positions come from the padding mask, the table has two rows in front of them.
import torch
from torch import nn, Tensor
from typing import Optional

from veriformer.properties import Subject


class LearnedPositionalEmbedding(nn.Embedding):
    """Row padding_idx is for padding, real tokens are numbered from padding_idx + 1 on."""

    def __init__(self, num_positions: int, dim: int, padding_idx: int = 1):
        self.first = padding_idx + 1
        super().__init__(num_positions + self.first, dim)
        self.pad_row = padding_idx

    def forward(self, tokens: Tensor, keep: Optional[Tensor] = None) -> Tensor:
        if keep is None:
            steps = torch.arange(self.first, self.first + tokens.size(1), device=tokens.device)
            return super().forward(steps).unsqueeze(0)
        keep = keep.long()
        positions = torch.cumsum(keep, dim=1) * keep + self.pad_row
        return super().forward(positions)


class OPTDecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ffn_dim: int, dropout: float):
        super().__init__()
        self.heads, self.scaling = heads, (dim // heads) ** -0.5
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def shape(self, x: Tensor) -> Tensor:
        bsz, seq, dim = x.shape
        return x.view(bsz, seq, self.heads, dim // self.heads).transpose(1, 2)

    def forward(self, x: Tensor, hide: Tensor) -> Tensor:
        residual = x
        x = self.self_attn_layer_norm(x)
        q = self.shape(self.q_proj(x) * self.scaling)
        k, v = self.shape(self.k_proj(x)), self.shape(self.v_proj(x))
        weights = torch.matmul(q, k.transpose(2, 3)).masked_fill(hide, torch.finfo(x.dtype).min)
        weights = torch.softmax(weights, dim=-1)
        x = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        x = residual + self.dropout(self.out_proj(x))
        residual = x
        x = self.fc2(torch.relu(self.fc1(self.final_layer_norm(x))))
        return residual + self.dropout(x)


class OPT(nn.Module):
    def __init__(self, vocab: int, dim: int, heads: int, layers: int, ffn_dim: int, max_positions: int, dropout: float):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.embed_positions = LearnedPositionalEmbedding(max_positions, dim)
        self.layers = nn.ModuleList([OPTDecoderLayer(dim, heads, ffn_dim, dropout) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, keep: Optional[Tensor] = None) -> Tensor:
        seq = tokens.size(1)
        hide = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        if keep is not None:
            hide = hide | ~keep[:, None, None, :]
        x = self.embed_tokens(tokens) + self.embed_positions(tokens, keep)
        for layer in self.layers:
            x = layer(x, hide)
        return self.lm_head(self.final_layer_norm(x))


subject = Subject(
    kind="decoder",
    name="OPT",
    build=lambda c: OPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "learned",
        "position_offset": 2,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "tied": True,
        "padding_side": "both",
    },
)
