import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import BaseModel, Field


class ModelConfig(BaseModel):
    vocab_size: int = Field(gt=0)
    context_length: int = Field(default=512, gt=0)
    hidden_size: int = Field(default=256, gt=0)
    num_heads: int = 8
    num_layers: int = 4
    mlp_ratio: float = 4.0
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.nh = cfg.num_heads
        self.n1, self.n2 = nn.RMSNorm(cfg.hidden_size), nn.RMSNorm(cfg.hidden_size)
        self.qkv = nn.Linear(cfg.hidden_size, 3 * cfg.hidden_size, bias=False)
        self.o = nn.Linear(cfg.hidden_size, cfg.hidden_size, bias=False)
        inner = int(cfg.mlp_ratio * cfg.hidden_size)
        self.up = nn.Linear(cfg.hidden_size, inner)
        self.down = nn.Linear(inner, cfg.hidden_size)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, attn_mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (a.view(b, t, self.nh, d // self.nh).transpose(1, 2) for a in (q, k, v))
        s = q @ k.mT / (d // self.nh) ** 0.5
        s = s.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask[:, None, None, :], torch.finfo(s.dtype).min)
        y = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d)
        x = x + self.drop(self.o(y))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class DecoderLM(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        self.emb = nn.Embedding(config.vocab_size, config.hidden_size)
        self.pos = nn.Embedding(config.context_length, config.hidden_size)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens, attn_mask=None):
        x = self.emb(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attn_mask)
        return self.head(self.norm(x))
