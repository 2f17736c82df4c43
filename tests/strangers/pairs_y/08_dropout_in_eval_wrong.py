WHAT = "scaled_dot_product_attention gets dropout_p whether the model trains or not, so that eval() leaves dropout of the attention weights on (line 43)."
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import DrawnConfig, Subject


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000):
        super().__init__()
        if head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even, got {head_dim}")
        self.head_dim, self.base = head_dim, base

    def forward(self, x):
        n = x.shape[-2]
        freq = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=x.device) / self.head_dim)
        theta = torch.arange(n, dtype=torch.float64, device=x.device)[:, None] * freq
        theta = torch.cat([theta, theta], dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        turned = torch.cat([-x2, x1], dim=-1)
        return x * theta.cos().to(x.dtype) + turned * theta.sin().to(x.dtype)


class RoFormerBlock(nn.Module):
    def __init__(self, dim, heads, mlp_dim, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.rotary = Rotary(dim // heads)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, mlp_dim)
        self.fc2 = nn.Linear(mlp_dim, dim)
        self.drop = nn.Dropout(dropout)

    def attend(self, x, mask):
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.rotary(q), self.rotary(k)
        p = self.dropout
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.proj(out.permute(0, 2, 1, 3).reshape(b, n, d))

    def forward(self, x, mask):
        x = x + self.drop(self.attend(self.norm1(x), mask))
        x = x + self.drop(self.fc2(F.relu(self.fc1(self.norm2(x)))))
        return x


class RoFormer(nn.Module):
    def __init__(self, vocab_size, dim, depth, heads, mlp_dim, dropout):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList()
        for _ in range(depth):
            self.blocks.append(RoFormerBlock(dim, heads, mlp_dim, dropout))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids, attention_mask=None):
        mask = None
        if attention_mask is not None:
            mask = attention_mask.bool()[:, None, None, :]
        x = self.drop(self.emb(ids))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


def build(c: DrawnConfig):
    return RoFormer(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout)


subject = Subject(
    kind="encoder",
    name="RoFormer",
    build=build,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "halves",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "padding_side": "both",
    },
)
