WHAT = 'In the shifted block the tokens are rolled but the padding mask is not (`x = x.roll(...)` without `keep = keep.roll(...)`), so wrong tokens are hidden in the shifted windows.'
import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class WindowBlock(nn.Module):
    """A Swin block over a sequence: attention within windows, every second block shifted by half a window."""

    def __init__(self, dim, heads, hidden, shift):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def attend(self, x, keep, region):
        B, T, D = x.shape
        n, w = T // WINDOW, WINDOW
        q, k, v = self.qkv(x).view(B, n, w, 3, self.heads, D // self.heads).permute(3, 0, 1, 4, 2, 5)
        allowed = keep.view(B, n, 1, 1, w) & (region.view(n, w, 1) == region.view(n, 1, w))[None, :, None]
        scores = q @ k.transpose(-1, -2) * (D // self.heads) ** -0.5
        weights = scores.masked_fill(~allowed, torch.finfo(x.dtype).min).softmax(-1)
        return self.proj((weights @ v).transpose(2, 3).reshape(B, T, D))

    def forward(self, x, keep):
        T = x.shape[1]
        shortcut, x = x, self.norm1(x)
        region = torch.zeros(T, dtype=torch.long, device=x.device)
        if self.shift:
            x = x.roll(-self.shift, dims=1)
            region[T - self.shift:] = 1  # what came round from the front
        x = self.attend(x, keep, region)
        if self.shift:
            x = x.roll(self.shift, dims=1)
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class Swin1d(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(
            WindowBlock(dim, heads, hidden, WINDOW // 2 if i % 2 else 0) for i in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.tok(tokens) + self.pos(torch.arange(T, device=tokens.device))
        pad = -T % WINDOW
        x, keep = nn.functional.pad(x, (0, 0, 0, pad)), nn.functional.pad(keep, (0, pad), value=False)
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x[:, :T]))


subject = Subject(
    kind="encoder",
    name="Swin1d",
    build=lambda c: Swin1d(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "sparse": True, "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "padding_side": "right"},
)
