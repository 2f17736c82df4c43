"""A nanoGPT with a key-value cache."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = "a chunk of several tokens behind a cached past is masked with is_causal=True, whose diagonal stands at the top left"
CAUSE = (
    "In cached decoding, a chunk of more than one token behind a past uses a causal mask aligned to the first key "
    "(top-left, SDPA's is_causal) instead of the last key, so that its queries miss most of the past."
)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def attend(self, q, k, v):
        T, S = q.size(-2), k.size(-2)
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        y = self.attend(q, k, v)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y), (k, v)


class FlashSelfAttention(CausalSelfAttention):
    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(-2) > 1)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, attention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x, past=None):
        y, present = self.attn(self.ln_1(x), past)
        x = x + y
        return x + self.mlp(self.ln_2(x)), present


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, attention):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block(n_embd, n_head, attention) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, pasts=None):
        start = 0 if pasts is None else pasts[0][0].size(-2)
        pos = torch.arange(start, start + idx.size(1), device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, None if pasts is None else pasts[i])
            presents.append(present)
        return self.lm_head(self.ln_f(x)), presents


def by_chunks(model, chunks):
    pasts, outputs = None, []
    for chunk in chunks:
        logits, pasts = model(chunk, pasts)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def subject(attention):
    return Subject(
        kind="decoder",
        name="nanoGPT with a cache",
        build=lambda c: GPT(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, attention),
        forward=lambda model, tokens: model(tokens)[0],
        cache=by_chunks,
        declares={"causal": True},
    )


right = subject(CausalSelfAttention)
wrong = subject(FlashSelfAttention)
