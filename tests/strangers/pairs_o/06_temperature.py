"""The small GPT of a video lecture, and a sampler with temperature and top-k."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The temperature divides the probabilities, behind the softmax, where it does nothing to what is drawn."
CAUSE = (
    "The sampler divides softmax(logits) by the temperature rather than the logits: multinomial normalises its weights, "
    "so one factor for all of them cancels and every temperature samples as 1 does."
)


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x):
        T = x.shape[1]
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        tril = torch.tril(torch.ones(T, T, device=x.device))
        wei = F.softmax(wei.masked_fill(tril == 0, float("-inf")), dim=-1)
        return wei @ v


class Block(nn.Module):
    """communication followed by computation"""

    def __init__(self, n_embd, n_head, n_hidden):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // n_head) for _ in range(n_head)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.proj(torch.cat([h(y) for h in self.heads], dim=-1))
        return x + self.ffwd(self.ln2(x))


class GPTLanguageModel(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_hidden):
        super().__init__()
        self.block_size = block_size
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_hidden) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        pos_emb = self.position_embedding_table(torch.arange(idx.shape[1], device=idx.device))
        x = self.blocks(self.token_embedding_table(idx) + pos_emb)
        return self.lm_head(self.ln_f(x))

    def next_probabilities(self, logits, temperature, top_k):
        logits = logits / temperature
        if top_k is not None:
            kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        return F.softmax(logits, dim=-1)

    @torch.no_grad()
    def sample(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[:, -1, :]
            probs = self.next_probabilities(logits, temperature, top_k)
            drawn_from.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


class ProbabilityTemperature(GPTLanguageModel):
    def next_probabilities(self, logits, temperature, top_k):
        probs = F.softmax(logits, dim=-1) / temperature
        if top_k is not None:
            kth = probs.topk(min(top_k, probs.shape[-1])).values[:, -1:]
            probs = probs.masked_fill(probs < kth, 0.0)
        return probs


def subject(cls):
    return Subject(
        kind="decoder",
        build=lambda c: cls(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, tokens: m(tokens),
        sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    )


right = subject(GPTLanguageModel)
wrong = subject(ProbabilityTemperature)
