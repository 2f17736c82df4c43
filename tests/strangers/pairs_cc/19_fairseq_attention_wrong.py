WHAT = 'heads are folded into the batch sample by sample, but the padding mask is repeated head by head (line 30), so that with more than one sample and head scores get the padding mask of another sample'
import torch
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    """Time first inside, heads folded into the batch."""

    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout_module = nn.Dropout(dropout)

    def fold(self, x, length, bsz):
        return x.contiguous().view(length, bsz * self.num_heads, self.head_dim).transpose(0, 1)

    def forward(self, x, attention_mask=None):
        x = x.transpose(0, 1)
        tgt_len, bsz, embed_dim = x.shape
        q = self.fold(self.q_proj(x) * self.scaling, tgt_len, bsz)
        k = self.fold(self.k_proj(x), tgt_len, bsz)
        v = self.fold(self.v_proj(x), tgt_len, bsz)
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        if attention_mask is not None:
            padding = attention_mask.bool().repeat(self.num_heads, 1)
            attn_weights = attn_weights.masked_fill(~padding.unsqueeze(1), torch.finfo(attn_weights.dtype).min)
        attn_probs = self.dropout_module(attn_weights.softmax(dim=-1))
        attn = torch.bmm(attn_probs, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn).transpose(0, 1)


subject = Subject(
    kind="self_attention",
    name="fairseq attention",
    build=lambda c: MultiheadAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    projections=lambda m: {
        "q": m.q_proj.weight, "k": m.k_proj.weight, "v": m.v_proj.weight, "o": m.out_proj.weight,
        "q_bias": m.q_proj.bias, "k_bias": m.k_proj.bias, "v_bias": m.v_proj.bias, "o_bias": m.out_proj.bias,
    },
    declares={"causal": False, "positions": "none", "bias": True, "padding_side": "both"},
)
