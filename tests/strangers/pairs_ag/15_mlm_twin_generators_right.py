"""BERT's masking: 15 % of the tokens are predicted, of these 10 % stay, 10 % become a random token, 80 % [MASK]."""
import torch

from veriformer.properties import Subject

PAD, MASK, CLS = 0, 1, 2
SPECIAL = (PAD, MASK, CLS)


class MaskTokens:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size, self.p = vocab_size, mlm_probability

    def __call__(self, tokens, seed):
        choose = torch.Generator().manual_seed(seed)
        corrupt = choose

        special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        chosen = (torch.rand(tokens.shape, generator=choose).to(tokens.device) < self.p) & ~special
        labels = torch.where(chosen, tokens, torch.full_like(tokens, -100))

        action = torch.rand(tokens.shape, generator=corrupt).to(tokens.device)
        words = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=corrupt).to(tokens.device)
        inputs = torch.where(chosen & (action >= 0.2), torch.full_like(tokens, MASK), tokens)
        inputs = torch.where(chosen & (action >= 0.1) & (action < 0.2), words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT masking",
    build=lambda c: MaskTokens(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
