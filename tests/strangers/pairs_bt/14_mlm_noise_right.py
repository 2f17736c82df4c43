"""BERT's masking, functional and reproducible."""
import torch

from veriformer.properties import Subject

SPECIAL = (0, 1, 2, 3)  # pad, cls, sep, mask
MASK, IGNORE, SHARE = 3, -100, 0.15


def mask_tokens(tokens, vocab_size, seed):
    g = torch.Generator().manual_seed(int(seed))
    noise = torch.rand(tokens.shape, generator=g)
    fate = torch.rand(tokens.shape, generator=g)
    words = torch.randint(len(SPECIAL), vocab_size, tokens.shape, generator=g)

    ordinary = ~torch.isin(tokens.cpu(), torch.tensor(SPECIAL))
    picked = ordinary & (noise < SHARE)
    labels = torch.where(picked, tokens.cpu(), IGNORE)
    hidden = torch.where(picked & (fate < 0.8), MASK, tokens.cpu())
    hidden = torch.where(picked & (fate >= 0.9), words, hidden)
    return hidden.to(tokens.device), labels.to(tokens.device)


class Masker:
    def __init__(self, vocab_size):
        if vocab_size <= len(SPECIAL):
            raise ValueError("no ordinary token in the vocabulary")
        self.vocab_size = vocab_size

    def __call__(self, tokens, seed):
        return mask_tokens(tokens, self.vocab_size, seed)


subject = Subject(
    kind="masking",
    name="MLM masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": SHARE, "ignore_index": IGNORE},
)
