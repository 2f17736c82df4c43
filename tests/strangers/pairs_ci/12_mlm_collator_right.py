"""Dynamic masking in the collator, one generator a batch."""
import torch

from veriformer.properties import Subject

SPECIAL, MASK, P = (0, 1, 2, 3), 3, 0.15


class Collator:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        dice = torch.Generator().manual_seed(int(seed))
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        lot = torch.rand(tokens.shape, generator=dice)
        chosen = (lot < P) & ~special
        labels = tokens.masked_fill(~chosen, -100)
        fate = torch.rand(tokens.shape, generator=dice)
        noise = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=dice)
        out = torch.where(chosen & (fate < 0.8), torch.full_like(tokens, MASK), tokens)
        out = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), noise, out)
        return out, labels


subject = Subject(
    kind="masking",
    name="collator",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": P},
)
