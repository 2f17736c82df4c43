WHAT = 'prompt-lookup (speculative) decoding crops the cache to all ids so far instead of all but the last one, which is still to be fed: after a rejection the key of one rejected draft token stays and every later position is one too far (line 82).'
"""A small GPT with prompt-lookup decoding: drafts are copied from the text and verified in one forward."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask, past):
        q, k, v = (p(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        a = s.masked_fill(~mask, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        return self.o_proj((a @ v).transpose(1, 2).flatten(2)), (k, v)


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = Attention(d, h)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, mask, past):
        a, past = self.attn(self.n1(x), mask, past)
        x = x + a
        return x + self.down(F.relu(self.up(self.n2(x)))), past


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, ids, attention_mask=None, past=None):
        done = 0 if past is None else past[0][0].shape[2]
        T = ids.shape[1]
        mask = torch.ones(T, done + T, dtype=torch.bool, device=ids.device).tril(done)[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        x = self.emb(ids) + self.pos.weight[done:done + T]
        new = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, mask, None if past is None else past[i])
            new.append(kv)
        return self.head(self.norm(x)), new


def draft(ids, most):
    """What followed the last earlier occurrence of the last token."""
    for i in range(len(ids) - 2, -1, -1):
        if ids[i] == ids[-1]:
            return ids[i + 1:i + 1 + most]
    return []


def crop(past, length):
    return [(k[:, :, :length], v[:, :, :length]) for k, v in past]


def lookup(model, prompt, steps, most=4):
    ids, goal, past, fed = prompt.tolist(), len(prompt) + steps, None, 0
    while len(ids) < goal:
        guess = draft(ids, min(most, goal - len(ids) - 1))
        block = ids[fed:] + guess
        logits, past = model(torch.tensor([block], device=prompt.device), past=past)
        best = logits[0, len(block) - len(guess) - 1:].argmax(-1).tolist()
        n = 0
        while n < len(guess) and guess[n] == best[n]:
            n += 1
        ids += best[:n + 1]  # the drafts that were right, and the token after them
        past = crop(past, len(ids))
        fed = len(ids) - 1
    return torch.tensor(ids[:goal], device=prompt.device)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    if use_cache:
        return torch.stack([lookup(model, row, steps) for row in tokens])
    for _ in range(steps):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


subject = Subject(
    kind="decoder",
    build=LM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    generate=generate,
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "relu", "bias": True, "output_bias": True, "tied": False,
              "padding_side": "right"},
)
