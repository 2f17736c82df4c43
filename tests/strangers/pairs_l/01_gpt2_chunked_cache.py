"""GPT-2 from the paper and the nanoGPT habit, with a key-value cache that takes chunks."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def gpt2(attend):
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.n_head = n_head
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)

        def forward(self, x, past=None):
            B, T, C = x.shape
            q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, -1))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            y = attend(q, k, v)
            return self.c_proj(y.transpose(1, 2).reshape(B, T, C)), (k, v)

    class Block(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

        def forward(self, x, past=None):
            a, present = self.attn(self.ln_1(x), past)
            x = x + a
            return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), present

    class GPT2(nn.Module):
        def __init__(self, vocab_size, n_ctx, n_embd, n_head, n_layer):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_ctx, n_embd)
            self.h = nn.ModuleList([Block(n_embd, n_head) for _ in range(n_layer)])
            self.ln_f = nn.LayerNorm(n_embd)
            self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
            self.lm_head.weight = self.wte.weight

        def forward(self, idx, past=None):
            start = 0 if past is None else past[0][0].size(2)
            x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.size(1), device=idx.device))
            presents = []
            for i, block in enumerate(self.h):
                x, present = block(x, None if past is None else past[i])
                presents.append(present)
            return self.lm_head(self.ln_f(x)), presents

    return GPT2


def by_offset(q, k, v):
    T, S = q.size(2), k.size(2)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_flag(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)


def chunked(model, chunks):
    past, out = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        out.append(logits)
    return torch.cat(out, 1)


def subject(cls):
    return Subject(
        kind="decoder",
        name="gpt2",
        build=lambda c: cls(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers),
        forward=lambda m, tokens: m(tokens)[0],
        cache=chunked,
        declares={
            "causal": True,
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "pre",
            "activation": "gelu_tanh",
            "tied": True,
        },
    )


right = subject(gpt2(by_offset))
wrong = subject(gpt2(by_flag))
WHAT = "is_causal=True with a cache: the mask of a chunk of several tokens is aligned top-left, so they see only the first keys"
CAUSE = (
    "When a chunk of more than one token follows a cache, the causal mask is aligned to the top-left corner instead of "
    "the bottom-right (not offset by the cached length), so its queries miss most of the past; single tokens are fine."
)
