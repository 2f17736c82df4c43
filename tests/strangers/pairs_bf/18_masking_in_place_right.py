"""Dynamic masking of BERT: 15 % are predicted; of these 80 % [MASK], 10 % a random word, 10 % as they are."""
import torch

from veriformer.properties import Subject

SPECIAL, MASK, SHARE = (0, 1, 2), 3, 0.15


class Collator:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def mask_tokens(self, tokens, generator):
        inputs = tokens.clone()
        labels = tokens.clone()
        special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        u = torch.rand(tokens.shape, generator=generator).to(tokens.device)
        chosen = (u < SHARE) & ~special
        labels[~chosen] = -100
        fate = torch.rand(tokens.shape, generator=generator).to(tokens.device)
        words = torch.randint(self.vocab_size, tokens.shape, generator=generator).to(tokens.device)
        inputs[chosen & (fate < 0.8)] = MASK
        swap = chosen & (fate >= 0.8) & (fate < 0.9)
        inputs[swap] = words[swap]
        return inputs, labels


subject = Subject(
    kind="masking",
    name="dynamic masking",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m.mask_tokens(tokens, torch.Generator().manual_seed(seed)),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": SHARE},
)
