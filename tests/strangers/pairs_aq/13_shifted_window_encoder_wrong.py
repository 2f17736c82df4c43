WHAT = 'the cyclic shift is undone in the wrong direction (rolled by -shift again): each position receives the attention output of the position 2*shift behind it, padded ones included (line 36: y = torch.roll(y, -self.shift, 1))'
"""Swin in one dimension over image-row codes: windows of 4, every second layer shifted by 2."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class WindowBlock(nn.Module):
    def __init__(self, dim, heads, hidden, shift):
        super().__init__()
        self.heads, self.shift = heads, shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def window_attention(self, x, mask):
        """x [B, L, D], mask [B, L], L a multiple of WINDOW."""
        B, L, D = x.shape
        region = torch.zeros(L, dtype=torch.long, device=x.device)
        if self.shift:
            region[-self.shift:] = 1
            x, mask = torch.roll(x, -self.shift, 1), torch.roll(mask, -self.shift, 1)
        n = L // WINDOW
        q, k, v = self.qkv(x).view(B, n, WINDOW, 3, self.heads, D // self.heads).permute(3, 0, 1, 4, 2, 5)
        region = region.view(n, WINDOW)
        same = (region[:, :, None] == region[:, None, :])[None, :, None]
        allowed = same & mask.view(B, n, 1, 1, WINDOW)
        scores = (q @ k.transpose(-1, -2)) / (D // self.heads) ** 0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        y = self.proj((weights @ v).transpose(2, 3).reshape(B, L, D))
        if self.shift:
            y = torch.roll(y, -self.shift, 1)
        return y

    def forward(self, x, mask):
        T = x.shape[1]
        extra = -T % WINDOW
        y = F.pad(self.norm1(x), (0, 0, 0, extra))
        y = self.window_attention(y, F.pad(mask, (0, extra), value=False))
        x = x + y[:, :T]
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class WindowEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([WindowBlock(dim, heads, hidden, (i % 2) * (WINDOW // 2)) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="shifted windows",
    build=lambda c: WindowEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "sparse": True, "positions": "learned", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "residual": True, "padding_side": "right"},
)
