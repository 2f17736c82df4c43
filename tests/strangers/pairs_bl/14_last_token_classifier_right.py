"""GPT with a head for sequences: the hidden state of the last real token is classified."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd))

    def forward(self, x, allowed):
        b, t, d = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln_2(x))


class GPTForSequenceClassification(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, n_inner, n_positions, num_labels):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.score = nn.Linear(n_embd, num_labels, bias=False)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        # padding may stand on either side: positions count real tokens
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        causal = torch.ones(length, length, dtype=torch.bool, device=input_ids.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=input_ids.device)
        allowed = (causal & attention_mask[:, None, None, :]) | itself

        x = self.wte(input_ids) + self.wpe(position_ids)
        for block in self.h:
            x = block(x, allowed)
        x = self.ln_f(x)

        last = (torch.arange(length, device=input_ids.device) * attention_mask.long()).argmax(dim=-1)
        return self.score(x[torch.arange(batch, device=x.device), last])


subject = Subject(
    kind="classifier",
    name="GPT for sequences",
    build=lambda c: GPTForSequenceClassification(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "pooling": "last",
        "padding_side": "both",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "output_bias": False,
    },
)
