"""nanoGPT with a `generate` that samples: temperature, top-k, and several prompts at once."""

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Top-k cuts at one threshold for the whole batch, the smallest k-th logit of any sample, instead of each sample's own."
CAUSE = (
    "The k-th largest logit is reduced over the batch as well (.min() over all of topk's values), so samples with "
    "higher logits than the lowest one keep more than k candidates; a batch of one is right."
)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.c_fc, self.c_out = nn.Linear(n_embd, n_inner), nn.Linear(n_inner, n_embd)

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        y = F.softmax(att.masked_fill(future, float("-inf")), dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_size = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    def threshold(self, logits, k):
        return torch.topk(logits, k, dim=-1).values[:, [-1]]

    @torch.no_grad()
    def generate(self, idx, steps, temperature=1.0, top_k=None):
        """Return the tokens [B, T + steps], and the probabilities [B, steps, V] that each was drawn by."""
        drawn_from = []
        for _ in range(steps):
            logits = self(idx[:, -self.block_size :])[:, -1, :] / temperature
            if top_k is not None:
                kth = self.threshold(logits, min(top_k, logits.size(-1)))
                logits = logits.masked_fill(logits < kth, -float("inf"))
            probs = F.softmax(logits, dim=-1)
            drawn_from.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


class BatchedGPT(GPT):
    def threshold(self, logits, k):
        return torch.topk(logits, k, dim=-1).values.min()


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=cls,
        forward=lambda m, tokens: m(tokens),
        sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.generate(tokens, steps, temperature, top_k),
    )


right = subject(GPT)
wrong = subject(BatchedGPT)
