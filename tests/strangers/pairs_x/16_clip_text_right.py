"""The text tower of CLIP (Radford et al. 2021): causal, QuickGELU, the features of the end-of-text token, projected."""

import torch
from torch import nn

from veriformer.properties import Subject


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head, d_ff):
        super().__init__()
        self.n_head = n_head
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.ln_1 = nn.LayerNorm(d_model)
        self.ln_2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), QuickGELU(), nn.Linear(d_ff, d_model))

    def attention(self, x):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.in_proj(x).chunk(3, dim=-1))
        mask = torch.full((T, T), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + mask).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CLIPText(nn.Module):
    def __init__(self, vocab_size, width, heads, layers, d_ff, context_length, embed_dim):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.empty(context_length, width))
        self.transformer = nn.ModuleList([ResidualAttentionBlock(width, heads, d_ff) for _ in range(layers)])
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.positional_embedding, std=0.01)
        nn.init.normal_(self.text_projection, std=width**-0.5)

    def features(self, text):
        if text.shape[1] > self.positional_embedding.shape[0]:
            raise ValueError("the text is longer than the context")
        x = self.token_embedding(text) + self.positional_embedding[: text.shape[1]]
        for block in self.transformer:
            x = block(x)
        return self.ln_final(x)

    def forward(self, text, attention_mask=None):
        """Texts are padded on the right, the last token that is real ends them."""
        if attention_mask is None:
            attention_mask = torch.ones_like(text)
        x = self.features(text)
        lengths = attention_mask.long().sum(dim=1)
        end = (lengths - 1).clamp(min=0)
        pooled = x[torch.arange(x.shape[0], device=x.device), end]
        return pooled @ self.text_projection


subject = Subject(
    kind="classifier",
    name="CLIP text",
    build=lambda c: CLIPText(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "learned",
        "pooling": "last",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "other",
        "bias": True,
        "output_bias": False,
        "padding_side": "right",
    },
)
