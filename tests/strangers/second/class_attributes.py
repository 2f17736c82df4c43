import torch
import torch.nn as nn
import torch.nn.functional as F


class Config:
    vocab_size = 5000
    emb = 128
    heads = 4
    depth = 3
    ctx = 64
    dropout = 0.0


class Attn(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.h = cfg.heads
        self.qkv = nn.Linear(cfg.emb, 3 * cfg.emb, bias=False)
        self.out = nn.Linear(cfg.emb, cfg.emb)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = [t.reshape(B, T, self.h, C // self.h).transpose(1, 2) for t in (q, k, v)]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class TinyGPT(nn.Module):
    def __init__(self, cfg=Config()):
        super().__init__()
        self.cfg = cfg
        self.tok = nn.Embedding(cfg.vocab_size, cfg.emb)
        self.pos = nn.Embedding(cfg.ctx, cfg.emb)
        self.attn = nn.ModuleList([Attn(cfg) for _ in range(cfg.depth)])
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(cfg.emb, 4 * cfg.emb), nn.SiLU(), nn.Linear(4 * cfg.emb, cfg.emb))
                                 for _ in range(cfg.depth)])
        self.n1 = nn.ModuleList([nn.LayerNorm(cfg.emb) for _ in range(cfg.depth)])
        self.n2 = nn.ModuleList([nn.LayerNorm(cfg.emb) for _ in range(cfg.depth)])
        self.nf = nn.LayerNorm(cfg.emb)
        self.head = nn.Linear(cfg.emb, cfg.vocab_size)

    def forward(self, x, y=None):
        h = self.tok(x) + self.pos(torch.arange(x.size(1), device=x.device))
        for a, f, n1, n2 in zip(self.attn, self.ff, self.n1, self.n2):
            h = h + a(n1(h))
            h = h + f(n2(h))
        logits = self.head(self.nf(h))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()) if y is not None else None
        return loss, logits
