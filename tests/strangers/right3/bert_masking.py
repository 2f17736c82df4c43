"""BERT's masking: 15 percent of the ordinary tokens, of them 80/10/10, from a seeded generator."""
import torch
from veriformer.properties import Subject

MASK, SPECIAL = 3, (0, 1, 2)

def mask_tokens(vocab, tokens, seed):
    g = torch.Generator().manual_seed(int(seed))
    draw = lambda: torch.rand(tokens.shape, generator=g)
    special = torch.isin(tokens, torch.tensor(SPECIAL))
    chosen = (draw() < 0.15) & ~special
    labels = tokens.masked_fill(~chosen, -100)
    how, other = draw(), torch.randint(4, vocab, tokens.shape, generator=g)
    out = torch.where(chosen & (how < 0.8), MASK, tokens)
    return torch.where(chosen & (how >= 0.8) & (how < 0.9), other, out), labels

common = dict(kind="masking", build=lambda c: c.vocab_size, forward=mask_tokens)
undeclared = Subject(**common)
declared = Subject(**common, declares={"mask_id": 3, "special_ids": (0, 1, 2), "mask_probability": 0.15, "ignore_index": -100})
