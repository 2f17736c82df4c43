"""Audio spectrogram Transformer on quantised frames: class token, learned positions, padded clips."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, ignore):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, key_padding_mask=ignore, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class AST(nn.Module):
    def __init__(self, codes, dim, heads, depth, hidden, max_frames, num_classes):
        super().__init__()
        self.frame_embed = nn.Embedding(codes, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, max_frames + 1, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, frames, attention_mask=None):
        B, T = frames.shape
        x = torch.cat((self.cls_token.expand(B, -1, -1), self.frame_embed(frames)), dim=1)
        x = x + self.pos_embed[:, : T + 1]
        ignore = None
        if attention_mask is not None:
            ignore = ~F.pad(attention_mask, (1, 0), value=True)  # the class token is always there
        for block in self.blocks:
            x = block(x, ignore)
        return self.head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="ast",
    build=lambda c: AST(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "cls", "extra_tokens": 1, "norm": "layer",
              "norm_placement": "pre", "final_norm": True, "activation": "gelu", "padding_side": "right"},
)
