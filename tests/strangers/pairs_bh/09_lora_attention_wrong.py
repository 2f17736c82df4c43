WHAT = "the merged LoRA update is (B A) transposed (fan_in_fan_out confused; square weights hide it): eval computes another layer than what was trained (line 27)."
"""Self-attention fine-tuned with LoRA on the queries and values: two thin products in training, one merged weight in eval."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class LoRALinear(nn.Module):
    """W is [out, in], A is [r, in], B is [out, r]; the adapter is a trained one, so B is not zero."""

    def __init__(self, in_features, out_features, r=2, lora_alpha=4, lora_dropout=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.lora_A = nn.Parameter(torch.empty(r, in_features))
        self.lora_B = nn.Parameter(torch.empty(out_features, r))
        self.scaling = lora_alpha / r
        self.dropout = nn.Dropout(lora_dropout)
        nn.init.xavier_uniform_(self.weight)
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        nn.init.normal_(self.lora_B, std=0.3)

    def delta(self):
        return self.scaling * (self.lora_A.T @ self.lora_B.T)

    def forward(self, x):
        if self.training:
            update = F.linear(F.linear(self.dropout(x), self.lora_A), self.lora_B)
            return F.linear(x, self.weight) + self.scaling * update
        return F.linear(x, self.weight + self.delta())


class LoRASelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.query = LoRALinear(dim, dim, lora_dropout=dropout)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = LoRALinear(dim, dim, lora_dropout=dropout)
        self.dense = nn.Linear(dim, dim, bias=False)
        self.key.requires_grad_(False)
        self.dense.requires_grad_(False)

    def forward(self, x, attention_mask=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.query(x), self.key(x), self.value(x)))
        scores = q @ k.transpose(2, 3) * q.size(-1) ** -0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="LoRA self-attention",
    build=lambda c: LoRASelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": False, "frozen": True},
)
