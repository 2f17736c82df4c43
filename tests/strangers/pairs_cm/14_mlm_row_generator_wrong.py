"""BERT masking, one row after another, from one uniform number a token."""
import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)
RATE = 0.15


class Masker:
    def __init__(self, vocab):
        if vocab <= len(SPECIAL):
            raise ValueError("nothing but special tokens")
        self.vocab = vocab

    def row(self, ids, rng):
        fixed = torch.isin(ids, torch.tensor(SPECIAL, device=ids.device))
        u = torch.rand(ids.shape, generator=rng).to(ids.device)
        other = torch.randint(len(SPECIAL), self.vocab, ids.shape, generator=rng).to(ids.device)
        chosen = (u < RATE) & ~fixed
        inputs = torch.where(chosen & (u < 0.9 * RATE), other, ids)
        inputs = torch.where(chosen & (u < 0.8 * RATE), torch.full_like(ids, MASK), inputs)
        return inputs, torch.where(chosen, ids, torch.full_like(ids, -100))

    def __call__(self, tokens, seed):
        inputs, labels = [], []
        for ids in tokens:
            rng = torch.Generator().manual_seed(int(seed))
            a, b = self.row(ids, rng)
            inputs.append(a)
            labels.append(b)
        return torch.stack(inputs), torch.stack(labels)


subject = Subject(
    kind="masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": RATE},
)

WHAT = 'The generator is seeded again for every row of the batch: all rows hide the same positions, and get the same random tokens, instead of independent ones (line 29).'
