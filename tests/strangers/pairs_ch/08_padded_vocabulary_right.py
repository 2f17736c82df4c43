"""nanoGPT with its vocabulary rounded up to a multiple of 16 (faster matrix products) and a loss in chunks of rows."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

ROWS = 8


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class PaddedGPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, max_len):
        super().__init__()
        self.vocab = vocab
        self.wte = nn.Embedding(-(-vocab // 16) * 16, width)
        self.wpe = nn.Embedding(max_len, width)
        self.h = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def states(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.ln_f(x)

    def head(self, states):
        return F.linear(states, self.wte.weight)  # tied

    def forward(self, idx):
        return self.head(self.states(idx))[..., : self.vocab]

    def loss(self, idx, labels):
        """Cross entropy; logits of ROWS tokens exist at a time."""
        states, labels = self.states(idx).flatten(0, 1), labels.flatten()
        total = states.new_zeros(())
        for part, wanted in zip(states.split(ROWS), labels.split(ROWS)):
            logits = self.head(part)[:, : self.vocab]
            total = total + F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")
        return total / (labels != -100).sum().clamp(min=1)


subject = Subject(
    kind="decoder",
    name="padded vocabulary",
    build=lambda c: PaddedGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={"positions": "learned", "tied": True, "norm_placement": "pre", "activation": "gelu", "empty_loss": "zero"},
)
