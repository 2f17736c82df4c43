"""Classifier for long documents: attention by slices of queries, and the mean over tokens streamed in slices too."""
import torch
from torch import nn

from veriformer.properties import Subject

SLICE = 4


def sliced_attention(q, k, v, mask):
    """One slice of queries at a time: the scores never exist as a whole."""
    floor = torch.finfo(q.dtype).min
    outs = []
    for part in (q * q.shape[-1] ** -0.5).split(SLICE, dim=-2):
        outs.append((part @ k.mT).masked_fill(~mask[:, None, None, :], floor).softmax(-1) @ v)
    return torch.cat(outs, -2)


def streamed_mean(states, mask):
    """Mean over real tokens, without a copy of `states` times the mask."""
    mean = states.new_zeros(states.shape[0], states.shape[2])
    seen = states.new_zeros(states.shape[0], 1)
    for i, (part, keep) in enumerate(zip(states.split(SLICE, 1), mask.to(states.dtype).split(SLICE, 1))):
        here = keep.sum(1, keepdim=True)
        local = torch.einsum("btd,bt->bd", part, keep) / here.clamp(min=1)
        seen = seen + here
        mean = mean + (local - mean) / (i + 1)
    return mean


class DocumentClassifier(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len, classes):
        super().__init__()
        self.heads = heads
        self.embedding, self.position = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.attn_norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.mlp_norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim) for _ in range(depth))
        self.proj = nn.ModuleList(nn.Linear(dim, dim) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(depth)
        )
        self.norm, self.classify = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, ids, mask=None):
        b, t = ids.shape
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        x = self.embedding(ids) + self.position(torch.arange(t, device=ids.device))
        for norm1, norm2, qkv, proj, mlp in zip(self.attn_norm, self.mlp_norm, self.qkv, self.proj, self.mlp):
            q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in qkv(norm1(x)).chunk(3, -1))
            x = x + proj(sliced_attention(q, k, v, mask).transpose(1, 2).flatten(2))
            x = x + mlp(norm2(x))
        return self.classify(streamed_mean(self.norm(x), mask))


subject = Subject(
    kind="classifier",
    name="documents",
    build=lambda c: DocumentClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "mean", "padding_side": "right"},
)

WHAT = 'The running mean gives every slice the same weight, however many real tokens it has: a short or padded last slice counts as much as a full one (line 27).'
