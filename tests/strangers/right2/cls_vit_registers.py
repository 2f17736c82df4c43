"""Classifier with a class token and two registers before the input (DINOv2), positions for the class token and the input
but none for the registers, LayerScale. Unusual: T + 3 positions inside; right, the mask is extended with ones for them."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject
REG = 2


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.n1, s.n2 = c.num_heads, nn.LayerNorm(D), nn.LayerNorm(D)
        s.qkv, s.proj, s.fc1, s.fc2 = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)
        s.ls1, s.ls2 = nn.Parameter(torch.full((D,), 0.1)), nn.Parameter(torch.full((D,), 0.1))

    def forward(s, x, keep):
        B, N, D = x.shape
        q, k, v = s.qkv(s.n1(x)).reshape(B, N, 3, s.h, D // s.h).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + s.ls1 * s.proj(y.transpose(1, 2).reshape(B, N, D))
        return x + s.ls2 * s.fc2(F.gelu(s.fc1(s.n2(x))))


class ViT(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.emb, s.cls, s.reg = nn.Embedding(c.vocab_size, D), nn.Parameter(torch.randn(1, 1, D) * 0.02), nn.Parameter(torch.randn(1, REG, D) * 0.02)
        s.pos = nn.Parameter(torch.randn(1, 1 + c.max_len, D) * 0.02)
        s.blocks, s.norm, s.head = nn.ModuleList(Block(c) for _ in range(c.num_layers)), nn.LayerNorm(D), nn.Linear(D, c.num_classes)

    def forward(s, tokens, mask=None):
        B, T = tokens.shape
        x = torch.cat((s.cls.expand(B, -1, -1), s.emb(tokens)), 1) + s.pos[:, : T + 1]
        x = torch.cat((x[:, :1], s.reg.expand(B, -1, -1), x[:, 1:]), 1)
        keep = None if mask is None else F.pad(mask, (1 + REG, 0), value=True)[:, None, None]
        for b in s.blocks:
            x = b(x, keep)
        return s.head(s.norm(x)[:, 0])


args = dict(kind="classifier", build=ViT, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "learned", "beyond_max_len": "error", "pooling": "cls", "extra_tokens": 1 + REG,
                                     "norm": "layer", "norm_placement": "pre", "final_norm": True, "activation": "gelu", "bias": True,
                                     "output_bias": True, "padding_side": "right", "structure": "other"})
