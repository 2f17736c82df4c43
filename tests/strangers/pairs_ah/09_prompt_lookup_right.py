"""Greedy decoding by prompt lookup: what followed the last token before is proposed, and verified in one cached call."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

DRAFT = 3


class Layer(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))

    def forward(self, x, past=None):
        y = self.n1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        t, s = q.shape[2], k.shape[2]
        seen = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.n2(x)), (k, v)


class LM(nn.Module):
    def __init__(self, vocab, d, heads, layers, ff, max_len):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([Layer(d, heads, ff) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab)
        self.max_len = max_len

    def forward(self, tokens, past=None):
        start = 0 if past is None else past[0][0].shape[2]
        x = self.emb(tokens) + self.pos(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        present = []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, None if past is None else past[i])
            present.append(kv)
        return self.head(self.norm(x)), present


def crop(past, length):
    return [(k[:, :, :length], v[:, :, :length]) for k, v in past]


def lookup(tokens, n):
    """What followed the latest earlier occurrence of the last token; the last token itself where there is none."""
    proposals = []
    for row in tokens:
        before = (row[:-1] == row[-1]).nonzero().flatten()
        at = int(before[-1]) + 1 if len(before) else len(row) - 1
        piece = row[at:at + n]
        proposals.append(torch.cat([piece, row[-1:].expand(n - len(piece))]))
    return torch.stack(proposals)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    goal = tokens.shape[1] + steps
    if not use_cache:
        while tokens.shape[1] < goal:
            tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], 1)
        return tokens
    past = None
    if steps:
        logits, past = model(tokens)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    while tokens.shape[1] < goal:
        n = min(DRAFT, goal - tokens.shape[1] - 1)
        draft = lookup(tokens, n)
        known = past[0][0].shape[2]
        logits, past = model(torch.cat([tokens[:, -1:], draft], 1), past)
        choice = logits.argmax(-1)  # [B, n + 1]: the model's own continuation at each place
        agreed = (choice[:, :-1] == draft).int().cumprod(1).sum(1).min().item()
        tokens = torch.cat([tokens, choice[:, :agreed + 1]], 1)
        past = crop(past, known + 1 + agreed)  # the last token, and the proposals that were right
    return tokens


subject = Subject(
    kind="decoder",
    name="LM with prompt lookup",
    build=lambda c: LM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens)[0],
    generate=generate,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)
