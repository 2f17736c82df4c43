"""Greedy decoding with prompt-lookup drafts, verified in one forward."""
import torch
from torch import nn

from veriformer.properties import Subject

DRAFT = 3


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, past=None):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.in_proj(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        T, S = q.shape[-2], k.shape[-2]
        hidden = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out_proj((w @ v).transpose(1, 2).flatten(2)), (k, v)


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.att = nn.ModuleList(Attention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.ffn = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
            for _ in range(c.num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.last, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, past=None):
        start = 0 if past is None else past[0][0].shape[-2]
        x, present = self.tok(tokens) + self.pos(torch.arange(start, start + tokens.shape[1])), []
        for n, (norm, att, ffn) in enumerate(zip(self.norms, self.att, self.ffn)):
            y, kv = att(norm(x), past and past[n])
            present.append(kv)
            x = x + y
            x = x + ffn(x)
        return self.head(self.last(x)), present


def crop(past, length):
    return [(k[..., :length, :], v[..., :length, :]) for k, v in past]


def lookup(sequence, count):
    """What followed the last token when it stood there before; else the token again."""
    for i in range(len(sequence) - 2, -1, -1):
        if sequence[i] == sequence[-1]:
            return sequence[i + 1 : i + 1 + count]
    return [sequence[-1]] * count


def speculate(model, prompt, steps):
    sequence, goal = list(prompt), len(prompt) + steps
    logits, past = model(torch.tensor([sequence]))
    sequence.append(int(logits[0, -1].argmax()))
    while len(sequence) < goal:
        draft = lookup(sequence, min(DRAFT, goal - len(sequence) - 1))
        logits, past = model(torch.tensor([sequence[-1:] + draft]), past)
        best, taken = logits[0].argmax(-1).tolist(), 0
        while taken < len(draft) and draft[taken] == best[taken]:
            taken += 1
        sequence += best[: taken + 1]
        past = crop(past, len(sequence) - 1)
    return sequence[:goal]


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if steps == 0:
        return tokens
    if use_cache:
        return torch.tensor([speculate(model, row, steps) for row in tokens.tolist()])
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


subject = Subject(
    kind="decoder",
    name="speculative",
    build=Decoder,
    forward=lambda m, tokens: m(tokens)[0],
    generate=generate,
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)
