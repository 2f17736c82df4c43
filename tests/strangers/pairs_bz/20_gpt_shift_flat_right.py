"""Causal LM with a loss of its own (Hugging Face convention: labels = input_ids, the model shifts); ALiBi, functional."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def alibi(heads, length, like):
    slopes = torch.tensor([2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]).to(like)
    t = torch.arange(length, device=like.device)
    distance = (t[None, :] - t[:, None]).to(like.dtype)
    bias = slopes[:, None, None] * distance
    return bias.masked_fill(t[None, :] > t[:, None], float("-inf"))


class AlibiLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.num_heads & (c.num_heads - 1):
            raise ValueError("ALiBi here is for powers of two")
        self.heads = c.num_heads
        d, f = c.d_model, c.d_ff
        self.wte = nn.Embedding(c.vocab_size, d)
        self.ln = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * c.num_layers))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(c.num_layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(c.num_layers))
        self.fc = nn.ModuleList(nn.Linear(d, f) for _ in range(c.num_layers))
        self.proj = nn.ModuleList(nn.Linear(f, d) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, c.vocab_size, bias=False)

    def forward(self, input_ids, labels=None):
        x = self.wte(input_ids)
        b, t, d = x.shape
        bias = alibi(self.heads, t, x)
        for i, (qkv, out, fc, proj) in enumerate(zip(self.qkv, self.out, self.fc, self.proj)):
            q, k, v = qkv(self.ln[2 * i](x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            x = x + out(y.transpose(1, 2).reshape(b, t, d))
            x = x + proj(F.gelu(fc(self.ln[2 * i + 1](x))))
        logits = self.lm_head(self.ln_f(x))
        loss = None
        if labels is not None:
            shift_logits = logits[:, :-1].reshape(-1, logits.size(-1))
            shift_labels = labels[:, 1:].reshape(-1)
            loss = F.cross_entropy(shift_logits, shift_labels, ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


subject = Subject(
    kind="decoder",
    name="alibi lm",
    build=AlibiLM,
    forward=lambda m, tokens: m(tokens).logits,
    loss=lambda m, tokens, labels: m(tokens, labels).loss,
    domain={"num_heads": (1, 2, 4, 8)},
    declares={"positions": "alibi", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu", "shifts_labels": True, "ignore_index": -100},
)
