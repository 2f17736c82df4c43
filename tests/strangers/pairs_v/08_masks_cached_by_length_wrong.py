WHAT = "The cache of masks is keyed by length and device alone, so that a global layer is given the sliding-window mask that the local layer before it stored (line 20)."
"""Decoder that alternates local and global layers; masks are built once and kept."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WINDOW = 3


class Masks:
    """Boolean masks [T, T], True = may attend, kept for all layers and later calls."""

    def __init__(self):
        self.kept = {}

    def __call__(self, length, window, device):
        key = (length, str(device))
        if key not in self.kept:
            steps = torch.arange(length, device=device)
            back = steps[:, None] - steps[None]
            mask = back >= 0
            if window is not None:
                mask = mask & (back < window)
            self.kept[key] = mask
        return self.kept[key]


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, masks):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=masks(length, self.window, x.device))
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(nn.Module):
    """The last layer is global, the one before it local, and so on downwards."""

    def __init__(self, c):
        super().__init__()
        self.masks = Masks()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        windows = [WINDOW if (c.num_layers - index) % 2 == 0 else None for index in range(c.num_layers)]
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, window) for window in windows)
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.masks)
        return self.head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="local and global layers",
    build=Decoder,
    forward=lambda model, tokens: model(tokens),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 7, dtype=torch.long)).shape)
