WHAT = "After a rejection the cache is cropped to the new number of tokens, n + accepted + 1, instead of one fewer (the last token is not yet in it), so the key of the first rejected draft token stays (line 70)."
"""Greedy decoding, plain and speculative: the first layer drafts, the whole model checks several tokens at once."""

import torch
from torch import nn

from veriformer.properties import Subject


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner):
        super().__init__()
        self.n_head = n_head
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.proj = nn.Linear(n_embd, n_embd, bias=False)
        self.fc, self.out = nn.Linear(n_embd, n_inner, bias=False), nn.Linear(n_inner, n_embd, bias=False)

    def forward(self, x, past=None):
        b, t, d = x.shape
        q, k, v = self.attn(self.ln1(x)).reshape(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        s = k.shape[-2]
        att = torch.einsum("bhtd,bhsd->bhts", q, k) * q.shape[-1] ** -0.5
        att = att + torch.full((t, s), float("-inf"), dtype=x.dtype, device=x.device).triu(s - t + 1)
        y = torch.einsum("bhts,bhsd->bthd", att.softmax(-1), v).reshape(b, t, d)
        x = x + self.proj(y)
        return x + self.out(torch.relu(self.fc(self.ln2(x)))), (k, v)


class Speculator(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, n_inner, n_ctx):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(n_ctx, n_embd)
        self.blocks = nn.ModuleList([Block(n_embd, n_head, n_inner) for _ in range(n_layer)])
        self.ln = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, pasts=None, start=0, depth=None):
        x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.shape[1], device=idx.device))
        for i, block in enumerate(self.blocks[:depth]):
            x, past = block(x, None if pasts is None else pasts[i])
            if pasts is not None:
                pasts[i] = past
        return self.head(self.ln(x))

    @torch.no_grad()
    def greedy(self, idx, steps):
        for _ in range(steps):
            idx = torch.cat((idx, self(idx)[:, -1:].argmax(-1)), 1)
        return idx

    @torch.no_grad()
    def speculative(self, idx, steps, ahead=3):
        total = idx.shape[1] + steps
        if steps == 0:
            return idx
        pasts = [None] * len(self.blocks)
        idx = torch.cat((idx, self(idx, pasts)[:, -1:].argmax(-1)), 1)
        while idx.shape[1] < total:
            n = idx.shape[1]  # the cache holds all but the last
            draft = idx
            for _ in range(min(ahead, total - n)):
                draft = torch.cat((draft, self(draft, depth=1)[:, -1:].argmax(-1)), 1)
            chosen = self(draft[:, n - 1 :], pasts, start=n - 1).argmax(-1)
            agreed = (chosen[:, :-1] == draft[:, n:]).all(0)
            accepted = int(agreed.long().cumprod(0).sum())
            idx = torch.cat((idx, chosen[:, : accepted + 1]), 1)[:, :total]
            crop(pasts, idx.shape[1])
        return idx


def crop(pasts, length):
    """Forget what was drafted and turned down."""
    for i, (k, v) in enumerate(pasts):
        pasts[i] = (k[..., :length, :], v[..., :length, :])


def generate(model, tokens, steps, use_cache):
    return model.speculative(tokens, steps) if use_cache else model.greedy(tokens, steps)


subject = Subject(
    kind="decoder",
    name="self-speculative decoder",
    build=lambda c: Speculator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    generate=generate,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
    },
)
