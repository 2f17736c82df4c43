WHAT = "searchsorted takes the left side, so the first token of every sample but the first counts to the sample before it in the packed row: it attends to that one, and its own sample does not see it (line 26)."
"""Padding-free decoder: the batch is packed into one row of real tokens (cu_seqlens, as flash-attn's varlen has it)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def pack(tokens, mask):
    """Real tokens of all samples in one row; where each sample begins (and where the last one ends)."""
    indices = mask.flatten().nonzero().squeeze(1)
    lengths = mask.sum(dim=1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    positions = (mask.long().cumsum(1) - 1).flatten()[indices]
    return tokens.flatten()[indices], indices, cu_seqlens, positions


def unpack(x, indices, batch, length):
    return x.new_zeros(batch * length, x.shape[-1]).index_copy(0, indices, x).view(batch, length, -1)


def varlen_causal_mask(cu_seqlens, total):
    """[total, total]: which keys of the packed row each query sees: its own sample's, up to itself."""
    at = torch.arange(total, device=cu_seqlens.device)
    sample = torch.searchsorted(cu_seqlens[1:], at)
    return (sample[:, None] == sample[None, :]) & (at[:, None] >= at[None, :])


class PackedBlock(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed):
        z = self.norm1(x)
        q, k, v = (f(z).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        x = x + self.o(torch.einsum("hij,jhd->ihd", weights, v).flatten(-2))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class PackedDecoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.position = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([PackedBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        packed, indices, cu_seqlens, positions = pack(tokens, attention_mask.bool())
        allowed = varlen_causal_mask(cu_seqlens, packed.shape[0])
        x = self.embed(packed) + self.position(positions)
        for block in self.blocks:
            x = block(x, allowed)
        return unpack(self.head(self.norm(x)), indices, *tokens.shape)


subject = Subject(
    kind="decoder",
    name="packed decoder",
    build=PackedDecoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
    },
)
