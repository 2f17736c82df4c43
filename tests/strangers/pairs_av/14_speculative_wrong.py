WHAT = "after a verification the cache is cropped to len(history), although the newest token is not in it yet: the first rejected draft keeps its keys and values, and all that follows stands one position late (line 86)"
"""A GPT that decodes greedily with prompt-lookup drafts: several tokens are proposed, one forward verifies them."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

DRAFT = 3


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, past=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        S = k.size(2)
        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), (k, v)


class Layer(nn.Module):
    def __init__(self, dim, heads, ff):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.ff1, self.ff2 = nn.LayerNorm(dim), nn.Linear(dim, ff), nn.Linear(ff, dim)

    def forward(self, x, past=None):
        y, present = self.attn(self.norm1(x), past)
        x = x + y
        return x + self.ff2(F.gelu(self.ff1(self.norm2(x)))), present


class GPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ff, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, ff) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, past=None):
        start = 0 if past is None else past[0][0].size(2)
        x = self.tok(tokens) + self.pos(torch.arange(start, start + tokens.size(1), device=tokens.device))
        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, None if past is None else past[i])
            presents.append(present)
        return self.head(self.norm(x)), presents


def crop(past, length):
    return [(k[:, :, :length], v[:, :, :length]) for k, v in past]


def propose(history, limit):
    """What followed the last token when it stood there before; else the token again."""
    last = history[-1]
    for i in range(len(history) - 2, -1, -1):
        if history[i] == last:
            found = history[i + 1 : i + 1 + limit]
            return found + [last] * (limit - len(found))
    return [last] * limit


def speculate(model, prompt, steps):
    history = prompt.tolist()
    end = len(history) + steps
    logits, past = model(prompt[None])
    history.append(int(logits[0, -1].argmax()))
    while len(history) < end:
        draft = propose(history, min(DRAFT, end - len(history) - 1))
        logits, past = model(torch.tensor([history[-1:] + draft], device=prompt.device), past)
        best = logits[0].argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[accepted]:
            accepted += 1
        history += draft[:accepted] + [best[accepted]]
        past = crop(past, len(history))
    return torch.tensor(history[:end], device=prompt.device)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if steps == 0:
        return tokens
    if use_cache:
        return torch.stack([speculate(model, row, steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="speculative GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens)[0],
    generate=generate,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)
