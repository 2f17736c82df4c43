"""A decoder without positions, decoded speculatively: a draft is looked up in the text, verified in one call, and what was
refused leaves the cache again."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

DRAFT = 3


class RMS(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = RMS(width), RMS(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, past):
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        S = k.shape[2]
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        weight = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf).softmax(-1)
        x = x + self.o((weight @ v).transpose(1, 2).reshape(B, T, D))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h)), (k, v)


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = RMS(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, pasts=None):
        x, kept = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, past = layer(x, None if pasts is None else pasts[i])
            kept.append(past)
        return self.head(self.norm(x)), kept


def look_up(text):
    """What followed the last token when it came before; else the token again."""
    for i in range(len(text) - 2, -1, -1):
        if text[i] == text[-1]:
            return text[i + 1 : i + 1 + DRAFT]
    return [text[-1]] * DRAFT


@torch.no_grad()
def speculate(model, text, steps, device):
    text, goal, pasts, done = list(text), len(text) + steps, None, 0
    while len(text) < goal:
        draft = look_up(text)
        block = torch.tensor([text[done:] + draft], device=device)
        logits, pasts = model(block, pasts)
        best = logits[0, len(text) - done - 1 :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[accepted]:
            accepted += 1
        text += best[: accepted + 1]
        refused = max(len(draft) - accepted - 1, 0)
        pasts = [(k[:, :, : k.shape[2] - refused], v[:, :, : v.shape[2] - refused]) for k, v in pasts]
        done = len(text) - 1  # the newest token is not in the cache yet
    return text[:goal]


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.tensor([speculate(model, row, steps, tokens.device) for row in tokens.tolist()], device=tokens.device)
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[0][:, -1:].argmax(-1)), 1)
    return tokens


subject = Subject(
    kind="decoder",
    name="speculative decoder",
    build=Decoder,
    forward=lambda model, tokens: model(tokens)[0],
    generate=generate,
    declares={"positions": "none", "norm": "rms", "norm_placement": "pre", "activation": "swiglu"},
)

WHAT = (
    'Line 81: '
    'One refused token too few is taken out of the cache (as if the token chosen in its place had been in it): the key and value of a refused draft stay and are attended to.'
)
