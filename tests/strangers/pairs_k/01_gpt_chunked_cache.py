"""A nanoGPT fork with a key-value cache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "With a cache, a chunk of several tokens is attended with SDPA's is_causal, which aligns the diagonal top-left."
CAUSE = (
    "When several tokens are decoded behind a non-empty cache the causal mask is aligned to the top-left instead of the "
    "bottom-right (the offset of the past is missing), so new tokens see only the first cached keys and not themselves."
)


def is_visible(T, S, device):
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)


def make(offset_diagonal):
    class CausalSelfAttention(nn.Module):
        def __init__(self, n_embd, n_head):
            super().__init__()
            self.c_attn = nn.Linear(n_embd, 3 * n_embd)
            self.c_proj = nn.Linear(n_embd, n_embd)
            self.n_head = n_head

        def forward(self, x, past=None):
            B, T, C = x.size()
            q, k, v = self.c_attn(x).split(C, dim=2)
            q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
            if past is not None:
                k = torch.cat((past[0], k), dim=2)
                v = torch.cat((past[1], v), dim=2)
            if past is not None and T > 1 and offset_diagonal:
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=is_visible(T, k.size(2), x.device))
            else:
                y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)
            y = y.transpose(1, 2).contiguous().view(B, T, C)
            return self.c_proj(y), (k, v)

    class Block(nn.Module):
        def __init__(self, n_embd, n_head, n_inner):
            super().__init__()
            self.ln_1 = nn.LayerNorm(n_embd)
            self.attn = CausalSelfAttention(n_embd, n_head)
            self.ln_2 = nn.LayerNorm(n_embd)
            self.c_fc = nn.Linear(n_embd, n_inner)
            self.c_proj = nn.Linear(n_inner, n_embd)

        def forward(self, x, past=None):
            a, present = self.attn(self.ln_1(x), past)
            x = x + a
            x = x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))
            return x, present

    class GPT(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(c.vocab_size, c.d_model),
                    wpe=nn.Embedding(c.max_len, c.d_model),
                    h=nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]),
                    ln_f=nn.LayerNorm(c.d_model),
                )
            )
            self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
            self.transformer.wte.weight = self.lm_head.weight
            self.apply(self._init_weights)

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, mean=0.0, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

        def forward(self, idx, past=None):
            start = 0 if past is None else past[0][0].size(2)
            pos = torch.arange(start, start + idx.size(1), device=idx.device)
            x = self.transformer.wte(idx) + self.transformer.wpe(pos)
            presents = []
            for i, block in enumerate(self.transformer.h):
                x, present = block(x, None if past is None else past[i])
                presents.append(present)
            return self.lm_head(self.transformer.ln_f(x)), presents

    return GPT


def decode(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def subject(offset_diagonal):
    GPT = make(offset_diagonal)
    return Subject(
        kind="decoder",
        name="nanoGPT with a cache",
        build=GPT,
        forward=lambda m, tokens: m(tokens)[0],
        cache=decode,
        declares={
            "positions": "learned",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "activation": "gelu",
            "tied": True,
            "output_bias": False,
        },
    )


right = subject(True)
wrong = subject(False)
