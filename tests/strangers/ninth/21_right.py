"""Text tower of CLIP: causal pre-norm Transformer with scaled dot-product attention, QuickGELU, and the
feature at the end-of-text token (the highest id of the sequence), projected to the shared space."""
import torch
from torch import nn


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class CausalAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.scale = self.head_width ** -0.5
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x, attn_mask):
        n, l, w = x.shape
        q, k, v = self.in_proj(x).reshape(n, l, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        logits = (q @ k.transpose(-1, -2)) * self.scale + attn_mask[:l, :l]
        out = logits.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).reshape(n, l, w))


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width * 4), QuickGELU(), nn.Linear(width * 4, width))

    def forward(self, x, attn_mask):
        x = x + self.attn(self.ln_1(x), attn_mask)
        return x + self.mlp(self.ln_2(x))


class CLIPTextEncoder(nn.Module):
    def __init__(
        self,
        vocab_size=120,
        context_length=24,
        width=64,
        layers=2,
        heads=4,
        embed_dim=32,
    ):
        super().__init__()
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.empty(context_length, width))
        self.resblocks = nn.ModuleList([ResidualAttentionBlock(width, heads) for _ in range(layers)])
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        mask = torch.full((context_length, context_length), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask, persistent=False)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=width ** -0.5)

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        for block in self.resblocks:
            x = block(x, self.attn_mask)
        x = self.ln_final(x)
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)] @ self.text_projection
