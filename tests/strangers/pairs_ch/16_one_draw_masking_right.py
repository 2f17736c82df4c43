"""BERT's masking from a single uniform draw a token: it says whether, how, and by which word."""
import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SHARE = 0.15


class Masker:
    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, tokens, seed):
        words = self.vocab - 4  # ordinary words follow the four special ids
        draw = torch.rand(tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        draw = draw.to(tokens.device)
        hidden = (draw < SHARE) & (tokens > MASK)
        labels = tokens.masked_fill(~hidden, -100)
        fate = draw / SHARE  # uniform in [0, 1) where hidden
        inputs = torch.where(hidden & (fate < 0.8), MASK, tokens)
        other = 4 + ((fate - 0.8) / 0.1 * words).long().clamp(0, words - 1)
        inputs = torch.where(hidden & (fate >= 0.8) & (fate < 0.9), other, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="one draw",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP, MASK), "mask_probability": SHARE},
)
