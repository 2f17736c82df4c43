WHAT = 'The padding mask is tiled (`key_padding_mask.repeat(self.num_heads, 1)`) while heads are folded as batch-major (b * num_heads + h), so that with several samples and heads a head gets the memory mask of another sample.'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    """Encoder-decoder attention in fairseq's layout: Time x Batch x Channel, heads folded into the batch."""

    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _fold(self, x, bsz):
        return x.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, query, key, key_padding_mask=None):
        tgt_len, bsz, embed_dim = query.size()
        src_len = key.size(0)
        q = self._fold(self.q_proj(query) * self.scaling, bsz)
        k = self._fold(self.k_proj(key), bsz)
        v = self._fold(self.v_proj(key), bsz)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * self.num_heads, tgt_len, src_len]

        if key_padding_mask is not None:
            # one row for each of the bsz * num_heads folded matrices
            folded = key_padding_mask.repeat(self.num_heads, 1).unsqueeze(1)
            attn_weights = attn_weights.masked_fill(folded, torch.finfo(attn_weights.dtype).min)

        attn_probs = F.softmax(attn_weights, dim=-1)
        attn_probs = F.dropout(attn_probs, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


def forward(model, x, memory, memory_mask=None):
    padding = None if memory_mask is None else ~memory_mask
    return model(x.transpose(0, 1), memory.transpose(0, 1), padding).transpose(0, 1)


subject = Subject(
    kind="cross_attention",
    name="fairseq encoder-decoder attention",
    build=lambda c: MultiheadAttention(c.d_model, c.num_heads, c.dropout),
    forward=forward,
    declares={"positions": "none", "bias": True},
)
