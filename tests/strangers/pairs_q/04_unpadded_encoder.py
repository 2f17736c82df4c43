"""An encoder that drops all padding first: the real tokens of the batch lie in one row, with cumulative lengths."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "In the packed row the first token of each sequence is counted to the sequence before it."
CAUSE = (
    "bucketize is called without right=True, so an index equal to a cumulative length falls into the earlier bucket: from the second "
    "sample on, the first token attends within the previous sample (at a position behind its end) and is missing from its own."
)


def sinusoids(position, width, dtype):
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=position.device) / width)
    angle = position[:, None].double() * rates
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width].to(dtype)


class PackedBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.Wqkv = nn.Linear(c.d_model, 3 * c.d_model)
        self.Wo = nn.Linear(c.d_model, c.d_model)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, same):  # x [N, D], same [N, N]
        n, d = x.shape
        q, k, v = self.Wqkv(self.attn_norm(x)).view(n, 3, self.h, d // self.h).permute(1, 2, 0, 3)
        scores = torch.einsum("hnd,hmd->hnm", q, k) * (d // self.h) ** -0.5
        probs = scores.masked_fill(~same, -torch.inf).softmax(-1)
        x = x + self.Wo(torch.einsum("hnm,hmd->nhd", probs, v).reshape(n, d))
        return x + self.mlp(self.mlp_norm(x))


class PackedEncoder(nn.Module):
    def __init__(self, c, right):
        super().__init__()
        self.right = right
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(PackedBlock(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        lengths = attention_mask.sum(1)
        ends = lengths.cumsum(0)
        starts = ends - lengths
        packed = tokens[attention_mask]  # [N]: without a single padding token
        index = torch.arange(len(packed), device=tokens.device)
        if self.right:
            sequence = torch.bucketize(index, ends, right=True)
        else:
            sequence = torch.bucketize(index, ends)
        x = self.embed(packed)
        x = x + sinusoids(index - starts[sequence], x.shape[-1], x.dtype)
        same = sequence[:, None] == sequence[None, :]
        for block in self.blocks:
            x = block(x, same)
        x = self.norm(x)
        padded = x.new_zeros(*tokens.shape, x.shape[-1])
        return padded.masked_scatter(attention_mask[..., None], x)


def make(right):
    return Subject(
        kind="encoder",
        name="packed encoder",
        build=lambda c: PackedEncoder(c, right),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False},
    )


right = make(True)
wrong = make(False)
