"""Decoder for packed rows: documents follow one another in a row, each ends with EOS, none sees another, and each
counts its positions from 0."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject

EOS = 0


def layout_of_documents(tokens, mask=None):
    """Which document a token is of [B, T], and its position in it [B, T]."""
    ends = tokens == EOS
    if mask is not None:
        ends = ends & mask
    starts = torch.ones_like(ends)
    starts[:, 1:] = ends[:, :-1]  # a document starts at the left edge, and behind the end of another
    document = starts.long().cumsum(dim=1)
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    first = torch.where(starts, index, 0).cummax(dim=0).values
    return document, index - first


class PackedLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.ln_attn, self.ln_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        scale = dim**-0.5
        self.wq = nn.Parameter(torch.randn(heads, dim, dim // heads) * scale)
        self.wk = nn.Parameter(torch.randn(heads, dim, dim // heads) * scale)
        self.wv = nn.Parameter(torch.randn(heads, dim, dim // heads) * scale)
        self.wo = nn.Parameter(torch.randn(heads, dim // heads, dim) * scale)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, visible):
        h = self.ln_attn(x)
        q = einsum("btd,hdk->bhtk", h, self.wq)
        k = einsum("bsd,hdk->bhsk", h, self.wk)
        v = einsum("bsd,hdk->bhsk", h, self.wv)
        sim = einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        att = sim.masked_fill(~visible[:, None], float("-inf")).softmax(dim=-1)
        x = x + einsum("bhts,bhsk,hkd->btd", att, v, self.wo)
        return x + self.down(torch.relu(self.up(self.ln_mlp(x))))


class PackedLM(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([PackedLayer(dim, heads, hidden) for _ in range(depth)])
        self.ln, self.unembed = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens, mask=None):
        document, position = layout_of_documents(tokens, mask)
        T = tokens.shape[1]
        visible = document[:, :, None] == document[:, None, :]
        visible = visible & torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
        if mask is not None:
            visible = visible & mask[:, None, :]
        visible = visible | torch.eye(T, dtype=torch.bool, device=tokens.device)  # padding sees itself: no empty row
        x = self.tok(tokens) + self.pos(position)
        for layer in self.layers:
            x = layer(x, visible)
        return self.unembed(self.ln(x))


subject = Subject(
    kind="decoder",
    name="packed lm",
    build=lambda c: PackedLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "sparse": True,  # documents
        "positions": "other",  # learned, counted from the start of the document
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "output_bias": True,
        "tied": False,
        "embedding_scale": False,
        "batch_coupled": False,
        "attention_scale": "1/sqrt(d_head)",
        "memory": "quadratic",
        "padding_side": "right",
        "structure": "other",
    },
)
