import attrs
import torch
from torch import nn


@attrs.define
class TransformerConfig:
    vocab: int
    width: int = 512
    n_heads: int = 8
    n_layers: int = 6
    max_tokens: int = 256
    p_dropout: float = 0.1


class LM(nn.Module):
    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.tok = nn.Embedding(config.vocab, config.width)
        self.pos = nn.Parameter(torch.randn(config.max_tokens, config.width) * 0.02)
        self.drop = nn.Dropout(config.p_dropout)
        self.attn = nn.ModuleList(nn.MultiheadAttention(config.width, config.n_heads, config.p_dropout, batch_first=True)
                                  for _ in range(config.n_layers))
        self.norm = nn.ModuleList(nn.LayerNorm(config.width) for _ in range(config.n_layers))
        self.out = nn.Linear(config.width, config.vocab)

    def forward(self, ids):
        T = ids.size(1)
        x = self.drop(self.tok(ids) + self.pos[:T])
        blocked = torch.triu(torch.ones(T, T, dtype=torch.bool, device=ids.device), 1)
        for attn, norm in zip(self.attn, self.norm):
            h = norm(x)
            x = x + attn(h, h, h, attn_mask=blocked, need_weights=False)[0]
        return self.out(x)
