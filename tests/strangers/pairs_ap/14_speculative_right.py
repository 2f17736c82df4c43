"""Greedy generation, sped up by prompt lookup: guessed tokens are verified several at once (speculative decoding)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class KV:
    def __init__(self, layers):
        self.store = [None] * layers

    @property
    def length(self):
        return 0 if self.store[0] is None else self.store[0].shape[-2]

    def append(self, layer, kv):
        past = self.store[layer]
        self.store[layer] = kv if past is None else torch.cat((past, kv), dim=-2)
        return self.store[layer]

    def truncate(self, length):
        self.store = [kv[..., :length, :] for kv in self.store]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.fc, self.proj = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, layer, cache):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.append(layer, torch.stack((k, v)))
        s = k.shape[-2]
        seen = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.proj(F.gelu(self.fc(self.ln2(x))))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.ln, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length
        x = self.tok(tokens) + self.pos(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache)
        return self.head(self.ln(x))


def lookup(ids, most):
    """What followed the last time that the newest token was seen; nothing if it is new."""
    for at in range(len(ids) - 2, -1, -1):
        if ids[at] == ids[-1]:
            return ids[at + 1 : at + 1 + most]
    return []


def speculate(model, prompt, steps, lookahead=4):
    ids, goal = prompt.tolist(), len(prompt) + steps
    cache = KV(len(model.blocks))
    if len(ids) > 1:
        model(prompt[None, :-1], cache)
    while len(ids) < goal:
        draft = lookup(ids, min(lookahead, goal - len(ids) - 1))
        logits = model(torch.tensor([ids[-1:] + draft], device=prompt.device), cache)
        best = logits[0].argmax(-1).tolist()
        accepted = 0
        while accepted < len(draft) and draft[accepted] == best[accepted]:
            accepted += 1
        ids += best[: accepted + 1]
        cache.truncate(len(ids) - 1)  # the newest token has not been through the model
    return torch.tensor(ids, device=prompt.device)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.stack([speculate(model, row, steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="prompt lookup",
    build=Decoder,
    forward=lambda model, tokens: model(tokens),
    generate=generate,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
    },
)
