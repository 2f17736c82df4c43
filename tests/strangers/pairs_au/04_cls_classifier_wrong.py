WHAT = 'the mask is lengthened for [CLS] at its end, [CLS] stands in front (line 51): it is off by one, the last real token is hidden and the last padding is seen'
"""Text classifier with a learned [CLS] vector in front (ViT style)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        if mask is not None:
            mask = mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class TextViT(nn.Module):
    def __init__(self, num_tokens, dim, depth, heads, mlp_dim, max_len, num_classes):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_emb = nn.Parameter(torch.randn(1, max_len + 1, dim))
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(
                nn.ModuleList([
                    nn.LayerNorm(dim),
                    Attention(dim, heads),
                    nn.LayerNorm(dim),
                    nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim)),
                ])
            )
        self.norm = nn.LayerNorm(dim)
        self.mlp_head = nn.Linear(dim, num_classes)

    def forward(self, tokens, mask=None):
        x = self.token_emb(tokens)
        b, n, _ = x.shape
        x = torch.cat((self.cls_token.expand(b, -1, -1), x), dim=1)
        x = x + self.pos_emb[:, : n + 1]
        if mask is not None:
            mask = F.pad(mask, (0, 1), value=True)
        for norm1, attn, norm2, ff in self.layers:
            x = attn(norm1(x), mask) + x
            x = ff(norm2(x)) + x
        return self.mlp_head(self.norm(x)[:, 0])


subject = Subject(
    kind="classifier",
    name="TextViT",
    build=lambda c: TextViT(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "cls", "extra_tokens": 1, "positions": "learned", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "gelu", "padding_side": "right",
    },
)
