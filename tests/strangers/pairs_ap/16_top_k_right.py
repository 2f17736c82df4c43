"""Character model with sampling; the filter was rewritten on one sort, which nucleus sampling is to share later."""
import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Head(nn.Module):
    """One head of self-attention (tutorial style)."""

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
        wei = wei.masked_fill(tril == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_hidden):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // n_head) for _ in range(n_head)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.net = nn.Sequential(nn.Linear(n_embd, n_hidden), nn.ReLU(), nn.Linear(n_hidden, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        z = self.ln1(x)
        x = x + self.proj(torch.cat([h(z) for h in self.heads], dim=-1))
        return x + self.net(self.ln2(x))


class CharModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_size = c.max_len
        self.token_embedding_table = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embedding_table = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, idx):
        pos = torch.arange(idx.shape[1], device=idx.device)
        x = self.token_embedding_table(idx) + self.position_embedding_table(pos)
        return self.lm_head(self.ln_f(self.blocks(x)))


def top_k_filter(logits, k):
    """Only the k likeliest tokens of each row stay."""
    _, order = logits.sort(dim=-1, descending=True)
    drop_sorted = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits) >= k
    drop = torch.zeros_like(drop_sorted).scatter(-1, order, drop_sorted)
    return logits.masked_fill(drop, float("-inf"))


@torch.no_grad()
def sample(model, idx, steps, temperature=1.0, top_k=None):
    drawn_from = []
    for _ in range(steps):
        logits = model(idx[:, -model.block_size :])[:, -1, :] / temperature
        if top_k is not None:
            logits = top_k_filter(logits, top_k)
        probs = F.softmax(logits, dim=-1)
        idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        drawn_from.append(probs)
    return idx, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="character model",
    build=CharModel,
    forward=lambda model, tokens: model(tokens),
    sampling=sample,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "output_bias": True,
    },
)
