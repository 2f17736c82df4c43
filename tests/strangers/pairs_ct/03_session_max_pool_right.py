"""Next-category prediction from a session of clicked items; the session vector is the maximum over its items."""
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from veriformer.properties import Subject


class SessionModel(nn.Module):
    def __init__(self, n_items, dim, heads, depth, hidden, longest, n_classes):
        super().__init__()
        self.heads = heads
        self.item = nn.Embedding(n_items, dim)
        self.place = nn.Embedding(longest, dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(nn.ModuleDict({
                "n1": nn.LayerNorm(dim), "qkv": nn.Linear(dim, 3 * dim), "out": nn.Linear(dim, dim),
                "n2": nn.LayerNorm(dim), "up": nn.Linear(dim, hidden), "down": nn.Linear(hidden, dim),
            }))
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, n_classes)

    def mix(self, layer, h, seen):
        n, t, d = h.shape
        q, k, v = (
            part.reshape(n, t, self.heads, d // self.heads).transpose(1, 2)
            for part in layer["qkv"](layer["n1"](h)).chunk(3, dim=-1)
        )
        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return layer["out"](mixed.transpose(1, 2).reshape(n, t, d))

    def forward(self, clicks, seen=None):
        if seen is None:
            seen = torch.ones_like(clicks, dtype=torch.bool)
        h = self.item(clicks) + self.place.weight[: clicks.shape[1]]
        for layer in self.layers:
            h = h + self.mix(layer, h, seen)
            h = h + layer["down"](layer["up"](layer["n2"](h)).relu())
        h = self.norm(h)
        session = h.masked_fill(~seen[..., None], torch.finfo(h.dtype).min).amax(dim=1)
        session = session.where(seen.any(dim=1, keepdim=True), 0.0)  # nobody has clicked
        return self.classify(session)


subject = Subject(
    kind="classifier",
    name="session model",
    build=lambda c: SessionModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "max", "positions": "learned", "padding_side": "right", "norm_placement": "pre"},
)
