# A character model: each head is a module of its own; head 0 of every layer reads the value of the token before each key.
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Head(nn.Module):
    def __init__(self, n_embd, head_size, longest, shifted):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.shifted = shifted
        self.register_buffer("tril", torch.tril(torch.ones(longest, longest, dtype=torch.bool)))

    def forward(self, x):
        T = x.shape[1]
        k, q, v = self.key(x), self.query(x), self.value(x)
        if self.shifted:
            v = F.pad(v, (0, 0, 1, 0))[:, :T]
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(~self.tril[:T, :T], float("-inf"))
        return F.softmax(wei, dim=-1) @ v


class MultiHeadAttention(nn.Module):
    def __init__(self, n_embd, n_head, longest):
        super().__init__()
        size = n_embd // n_head
        self.heads = nn.ModuleList([Head(n_embd, size, longest, shifted=i == 0) for i in range(n_head)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class FeedForward(nn.Module):
    def __init__(self, n_embd, n_inner):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, n_inner), nn.ReLU(), nn.Linear(n_inner, n_embd))

    def forward(self, x):
        return self.net(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner, longest):
        super().__init__()
        self.sa = MultiHeadAttention(n_embd, n_head, longest)
        self.ffwd = FeedForward(n_embd, n_inner)
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class CharacterModel(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, n_inner, longest):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(longest, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_inner, longest) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(idx.shape[1], device=idx.device))
        return self.lm_head(self.ln_f(self.blocks(x)))


subject = Subject(
    kind="decoder",
    build=lambda c: CharacterModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
)
