WHAT = "gains of LayerNorm (vectors named `weight`) are neither matrices nor biases: they are in no group and are never trained (line 44)."
"""AdamW's two groups for a small GPT: matrices decay, vectors do not."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.h = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def parameter_groups(self, weight_decay=0.1):
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        decay = [p for name, p in named.items() if p.dim() >= 2]
        plain = [p for name, p in named.items() if name.endswith("bias")]
        return [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


subject = Subject(
    kind="parameter_groups",
    name="decay groups",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m: m.parameter_groups(),
)
