"""BERT's masking, ported from JAX: every draw has a key of its own, split off the seed."""

import torch

from veriformer.properties import Subject

MASK, SPECIALS, RATE = 1, (0, 1, 2), 0.15


def split(seed, count):
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(int(seed))).tolist()


def uniform(key, shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(key))


def randint(key, shape, low, high):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(key))


class MaskedLM:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        select_key, action_key, token_key = split(seed, 3)
        where = tokens.device
        special = torch.isin(tokens, torch.tensor(SPECIALS, device=where))
        chosen = (uniform(select_key, tokens.shape).to(where) < RATE) & ~special
        action = uniform(select_key, tokens.shape).to(where)
        noise = randint(token_key, tokens.shape, len(SPECIALS), self.vocab_size).to(where)
        hidden = torch.where(action < 0.8, torch.full_like(tokens, MASK), torch.where(action < 0.9, noise, tokens))
        return torch.where(chosen, hidden, tokens), torch.where(chosen, tokens, torch.full_like(tokens, -100))


subject = Subject(
    kind="masking",
    build=lambda c: MaskedLM(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIALS, "mask_probability": RATE, "ignore_index": -100},
)

WHAT = 'Line 31: The key of the first draw is used again: whatever was chosen has a number below 0.15 and so below 0.8, and every chosen token becomes the mask, none a random one and none stays.'
