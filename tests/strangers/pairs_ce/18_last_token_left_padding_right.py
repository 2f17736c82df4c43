import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o, self.f1, self.f2 = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, seen):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).reshape(B, T, D))
        return x + self.f2(F.gelu(self.f1(self.n2(x)), approximate="tanh"))


class RewardModel(nn.Module):
    """Causal trunk, the last real token is scored."""

    def __init__(self, c):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        index = torch.arange(T, device=tokens.device)
        position = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.emb(tokens) + self.pos(position)
        own = torch.eye(T, dtype=torch.bool, device=tokens.device)  # padded rows keep one key
        seen = (index <= index[:, None]) & attention_mask[:, None, :] | own
        for layer in self.layers:
            x = layer(x, seen[:, None])
        last = (attention_mask * index).argmax(1)
        pooled = x[torch.arange(B, device=x.device), last]
        return self.score(self.norm(pooled))


subject = Subject(
    kind="classifier",
    name="reward model",
    build=RewardModel,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={"pooling": "last", "padding_side": "both", "positions": "learned", "norm": "layer",
              "norm_placement": "pre", "activation": "gelu_tanh", "output_bias": False, "final_norm": True},
)
