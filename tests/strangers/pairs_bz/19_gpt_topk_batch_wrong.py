WHAT = "The threshold of top-k is the least over the whole batch, so rows with larger logits keep more than k tokens (line 49)"
"""GPT with parallel attention and feed-forward, and nanoGPT's sampling."""
import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ParallelBlock(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln = nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_inner), nn.GELU(approximate="tanh"), nn.Linear(n_inner, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        y = self.ln(x)
        q, k, v = self.qkv(y).reshape(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(a.transpose(1, 2).reshape(B, T, C)) + self.mlp(y)


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.block_size = c.max_len
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([ParallelBlock(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        drawn_from = []
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits = logits.masked_fill(logits < v.min(), float("-inf"))
            probs = F.softmax(logits, dim=-1)
            drawn_from.append(probs)
            idx = torch.cat((idx, torch.multinomial(probs, num_samples=1)), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="parallel gpt",
    build=GPT,
    forward=lambda m, tokens: m(tokens),
    sampling=lambda m, tokens, steps, temperature=1.0, top_k=None: m.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "activation": "gelu_tanh", "structure": "other"},
)
