"""Multi-head attention with einsum over three-dimensional weights, no biases."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

class Attn(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, h = c.d_model, c.num_heads
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(d, h, d // h) * d**-0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(h, d // h, d) * d**-0.5)
    def probs(self, x, mask=None):
        q, k = torch.einsum("btd,dhk->bhtk", x, self.wq), torch.einsum("bsd,dhk->bhsk", x, self.wk)
        logits = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            mask = mask[:, None, None, :] if mask.shape == x.shape[:2] else mask.unsqueeze(-3)
            logits = torch.where(mask, logits, torch.finfo(x.dtype).min)
        return logits.softmax(-1)
    def forward(self, x, mask=None):
        v = torch.einsum("bsd,dhe->bhse", x, self.wv)
        return torch.einsum("bhts,bhse,hed->btd", self.probs(x, mask), v, self.wo)

common = dict(kind="self_attention", build=Attn, weights=lambda m, x, attention_mask=None: m.probs(x, attention_mask),
    mask_forms=("padding",), forward=lambda m, x, attention_mask=None: m(x, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": False, "positions": "none", "bias": False, "grouped_queries": False, "empty_row": "mean"})
