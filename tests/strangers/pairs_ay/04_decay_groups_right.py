"""minGPT's configure_optimizers, for a transformer with LayerScale (CaiT)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class LayerScale(nn.Module):
    def __init__(self, dim, init=1e-1):
        super().__init__()
        self.gamma = nn.Parameter(init * torch.ones(dim))

    def forward(self, x):
        return self.gamma * x


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ls_1 = LayerScale(dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, hidden)
        self.out = nn.Linear(hidden, dim)
        self.ls_2 = LayerScale(dim)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x = x + self.ls_1(self.proj(y))
        return x + self.ls_2(self.out(F.gelu(self.fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(max_len, dim)
        self.h = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))

    def configure_optimizers(self, weight_decay=0.1):
        """Matrices decay; biases, gains and other vectors do not."""
        decay, no_decay = [], []
        for module in self.modules():
            for name, p in module.named_parameters(recurse=False):
                if name == "bias":
                    no_decay.append(p)
                elif isinstance(module, (nn.Linear, nn.Embedding)):
                    decay.append(p)
                elif isinstance(module, (nn.LayerNorm, LayerScale)):
                    no_decay.append(p)
        return [
            {"params": decay, "weight_decay": weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="configure_optimizers",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model: model.configure_optimizers(0.1),
)
