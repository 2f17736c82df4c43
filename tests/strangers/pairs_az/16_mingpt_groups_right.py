"""The groups of parameters that a minGPT-like model hands to AdamW."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.key, self.query, self.value = (nn.Linear(n_embd, n_embd) for _ in range(3))
        self.proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))

    def forward(self, x):
        h = self.ln1(x)
        q, k, v = (f(h).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_inner):
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.shape[1]]
        return self.head(self.ln_f(self.blocks(x)))

    def optimizer_groups(self, weight_decay=0.1):
        decay, no_decay = set(), set()
        whitelist, blacklist = (nn.Linear,), (nn.LayerNorm, nn.Embedding)
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                fpn = f"{mn}.{pn}" if mn else pn
                if pn.endswith("bias"):
                    no_decay.add(fpn)
                elif pn.endswith("weight") and isinstance(m, whitelist):
                    decay.add(fpn)
                elif pn.endswith("weight") and isinstance(m, blacklist):
                    no_decay.add(fpn)
                elif pn.endswith("emb"):
                    no_decay.add(fpn)
        params = dict(self.named_parameters())
        return [
            {"params": [params[n] for n in sorted(decay)], "weight_decay": weight_decay},
            {"params": [params[n] for n in sorted(no_decay)], "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="groups of minGPT",
    build=lambda c: GPT(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m: m.optimizer_groups(),
)
