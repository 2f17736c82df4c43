"""A BERT-like encoder for ragged batches: samples are sorted by length and run in trimmed buckets of two."""

import torch
from torch import nn
from torch.nn.functional import pad

from veriformer.properties import Subject

WHAT = "The rows are put back with the sorting permutation itself, not with its inverse."
CAUSE = (
    "After the buckets have run, the batch is restored by indexing with `order` where order.argsort() is needed: the two "
    "agree while the permutation is its own inverse (up to two samples, or sorted ones), and from three samples on "
    "outputs land on other samples' rows."
)


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.output = nn.Linear(hidden, hidden)
        self.attention_norm, self.output_norm = nn.LayerNorm(hidden, eps=1e-12), nn.LayerNorm(hidden, eps=1e-12)
        self.ffn = nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden))

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        context = (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.output(context))
        return self.output_norm(x + self.ffn(x))


class BucketedEncoder(nn.Module):
    bucket = 2

    def __init__(self, vocab, hidden, heads, layers, inner, max_len):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position_embeddings = nn.Embedding(max_len, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(hidden, heads, inner) for _ in range(layers))

    def encode(self, tokens, mask):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_norm(self.word_embeddings(tokens) + self.position_embeddings(positions))
        for layer in self.layers:
            x = layer(x, mask)
        return x * mask.unsqueeze(-1).to(x.dtype)

    def restore(self, rows, order):
        return rows.index_select(0, order.argsort())

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        length = tokens.shape[1]
        ends = (mask * torch.arange(1, length + 1, device=tokens.device)).amax(dim=1)  # behind the last real token
        order = ends.argsort(descending=True, stable=True)
        rows = []
        for some in order.split(self.bucket):
            longest = max(int(ends[some].max()), 1)
            states = self.encode(tokens[some, :longest], mask[some, :longest])
            rows.append(pad(states, (0, 0, 0, length - longest)))
        return self.restore(torch.cat(rows), order)


class BucketedEncoderByOrder(BucketedEncoder):
    def restore(self, rows, order):
        return rows.index_select(0, order)


def subject(cls):
    return Subject(
        kind="encoder",
        name="bucketed encoder",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        mask_forms=("padding",),
        declares={"causal": False, "positions": "learned", "padding_side": "right", "norm_placement": "post"},
    )


right, wrong = subject(BucketedEncoder), subject(BucketedEncoderByOrder)
