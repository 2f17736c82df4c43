"""Prompt-lookup speculative decoding: drafts are copied from the context and verified in one pass over a cropped cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

DRAFT = 3


def rotate(x, start):
    half = x.shape[-1] // 2
    step = torch.arange(half, device=x.device, dtype=torch.float64)
    place = torch.arange(start, start + x.shape[-2], device=x.device, dtype=torch.float64)
    angle = place[:, None] * 10000.0 ** (-step / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, past=None):
        h = self.n1(x)
        q, k, v = (w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        start = 0 if past is None else past[0].shape[2]
        q, k = rotate(q, start), rotate(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(start)
        w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + self.wo((w @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x)))), (k, v)


class LM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("rotary needs heads of an even width")
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))
        self.norm, self.unembed = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, past=None):
        x, kept = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, None if past is None else past[i])
            kept.append(kv)
        return self.unembed(self.norm(x)), kept


def crop(past, length):
    return [(k[:, :, :length], v[:, :, :length]) for k, v in past]


def draft(ids, count):
    """What followed the last earlier occurrence of the newest token; the newest tokens themselves where there is none."""
    for at in range(len(ids) - 2, -1, -1):
        if ids[at] == ids[-1]:
            return ids[at + 1 : at + 1 + count]
    return ids[-count:] if count else []


@torch.no_grad()
def speculate(model, prompt, steps):
    ids, end = prompt.tolist(), len(prompt) + steps
    logits, past = model(prompt[None])
    if steps:
        ids.append(int(logits[0, -1].argmax()))
    while len(ids) < end:
        guess = draft(ids, min(DRAFT, end - len(ids) - 1))
        logits, past = model(prompt.new_tensor([[ids[-1], *guess]]), past)
        chosen = logits[0].argmax(-1).tolist()
        accepted = 0
        while accepted < len(guess) and guess[accepted] == chosen[accepted]:
            accepted += 1
        past = crop(past, len(ids) + min(accepted + 1, len(guess)))
        ids += chosen[: accepted + 1]
    return prompt.new_tensor(ids)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.stack([speculate(model, row, steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[0][:, -1:].argmax(-1)), 1)
    return tokens


subject = Subject(
    kind="decoder",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    generate=generate,
    declares={"positions": "rotary", "layout": "halves", "norm_placement": "pre"},
)

WHAT = 'After a verification the cache is cropped one too far: the keys and values of the first rejected draft token stay in it, and what follows is computed behind a token that is not in the text (line 84).'
