"""Sampling without multinomial (which synchronises the device): the Gumbel trick."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_ff):
        super().__init__()
        self.n_head = n_head
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, n_ff), nn.GELU(), nn.Linear(n_ff, n_embd))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_ff):
        super().__init__()
        self.block_size = block_size
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, n_ff) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))

    @torch.no_grad()
    def sample(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Return the sequence and the logits each new token was drawn from."""
        drawn_from = []
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size:])[:, -1, :]
            if top_k is not None:
                kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, [-1]]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            gumbel = -torch.empty_like(logits).exponential_().log()
            idx_next = (logits / temperature + gumbel).argmax(dim=-1, keepdim=True)
            drawn_from.append(logits / temperature)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx, torch.stack(drawn_from, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with Gumbel sampling",
    build=lambda c: GPT(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    sampling=lambda model, tokens, steps, temperature=1.0, top_k=None: model.sample(tokens, steps, temperature, top_k),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)
