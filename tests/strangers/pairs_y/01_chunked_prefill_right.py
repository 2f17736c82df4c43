import math

import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, layer_past=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in (q, k, v))
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=2)
            v = torch.cat((layer_past[1], v), dim=2)
        S = k.size(2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        if T > 1:  # a single token sees all that is there
            seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            att = att.masked_fill(~seen, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), (k, v)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.c_out = nn.Linear(n_inner, n_embd)

    def forward(self, x, layer_past=None):
        a, present = self.attn(self.ln_1(x), layer_past)
        x = x + a
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return x, present


class GPT2(nn.Module):
    def __init__(self, vocab_size, n_positions, n_embd, n_layer, n_head, n_inner):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(n_positions, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head, n_inner) for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, past=None):
        start = 0 if past is None else past[0][0].size(2)
        pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def cached(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-2 with a cache",
    build=lambda c: GPT2(c.vocab_size, c.max_len, c.d_model, c.num_layers, c.num_heads, c.d_ff),
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu_tanh"},
)
