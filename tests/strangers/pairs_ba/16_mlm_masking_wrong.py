WHAT = 'What is to be predicted is found by comparing the corrupted tokens with the original ones (line 23): the tenth that was chosen but left unchanged gets no label, so that unmasked tokens are never predicted.'
# BERT's masking: 15 % are chosen; of these 80 % become [MASK], 10 % a random token, 10 % stay.
import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)


class Masker:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (torch.rand(tokens.shape, generator=g) < self.probability) & ~special
        fate = torch.rand(tokens.shape, generator=g)
        noise = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=g)
        inputs = torch.where(chosen & (fate < 0.8), torch.full_like(tokens, MASK), tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), noise, inputs)
        labels = torch.where(inputs != tokens, tokens, torch.full_like(tokens, -100))
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
