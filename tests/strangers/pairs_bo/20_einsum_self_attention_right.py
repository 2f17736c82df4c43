import torch
from torch import einsum, nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = embed_size // heads
        self.to_q = nn.Linear(embed_size, embed_size, bias=False)
        self.to_k = nn.Linear(embed_size, embed_size, bias=False)
        self.to_v = nn.Linear(embed_size, embed_size, bias=False)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, x, mask=None):
        N, L, _ = x.shape
        queries = self.to_q(x).reshape(N, L, self.heads, self.head_dim)
        keys = self.to_k(x).reshape(N, L, self.heads, self.head_dim)
        values = self.to_v(x).reshape(N, L, self.heads, self.head_dim)
        energy = einsum("nqhd,nkhd->nhqk", queries, keys) * self.head_dim**-0.5
        if mask is not None:
            energy = energy.masked_fill(~mask[:, None, None, :], torch.finfo(energy.dtype).min)
        attention = energy.softmax(dim=-1)
        out = einsum("nhqk,nkhd->nqhd", attention, values)
        return self.fc_out(out.reshape(N, L, -1))


subject = Subject(
    kind="self_attention",
    name="einsum self-attention",
    build=lambda c: SelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "none", "attention_scale": "1/sqrt(d_head)", "empty_row": "mean"},
)
