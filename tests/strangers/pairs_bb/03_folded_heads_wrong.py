WHAT = 'heads are folded into the batch sample by sample, but the padding mask is tiled with repeat, head by head (line 35): with more than one sample most of the heads get the mask of another sample'
"""Bidirectional self-attention, fairseq style: heads are folded into the batch and multiplied with bmm / baddbmm."""
import torch
from torch import nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, x):
        """[B, T, D] to [B * H, T, D / H]"""
        bsz, length, _ = x.shape
        x = x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, x, key_padding_mask=None):
        bsz, length, width = x.shape
        q = self.fold(self.q_proj(x) * self.scaling)
        k = self.fold(self.k_proj(x))
        v = self.fold(self.v_proj(x))

        scores = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            hidden = key_padding_mask[:, None, :].expand(bsz, length, length)
            hidden = hidden.repeat(self.num_heads, 1, 1)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        probs = torch.softmax(scores, dim=-1)

        attn = torch.bmm(probs, v).view(bsz, self.num_heads, length, self.head_dim)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, length, width))


def run(model, x, attention_mask=None):
    return model(x, None if attention_mask is None else ~attention_mask)


def projections(model):
    return {
        "q": model.q_proj.weight, "k": model.k_proj.weight, "v": model.v_proj.weight, "o": model.out_proj.weight,
        "q_bias": model.q_proj.bias, "k_bias": model.k_proj.bias, "v_bias": model.v_proj.bias,
        "o_bias": model.out_proj.bias,
    }


subject = Subject(
    kind="self_attention",
    name="folded heads",
    build=lambda c: SelfAttention(c.d_model, c.num_heads),
    forward=run,
    projections=projections,
    declares={"causal": False, "positions": "none", "bias": True},
)
