"""BERT's masking with one uniform draw a token, for choosing and for what becomes of the chosen."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

MASK, SPECIAL = 1, (0, 1)


class Masking(nn.Module):
    """Of the tokens 15 % are to be predicted; of these 80 % are hidden, 10 % replaced and 10 % kept."""

    def __init__(self, vocab_size, share=0.15):
        super().__init__()
        self.vocab_size, self.share = vocab_size, share

    def forward(self, tokens, seed):
        generator = torch.Generator(device=tokens.device).manual_seed(int(seed))
        draw = torch.rand(tokens.shape, generator=generator, device=tokens.device, dtype=torch.float64)
        special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        chosen = (draw < self.share) & ~special
        fate = draw / self.share  # uniform on [0, 1) again, among the chosen
        hidden = chosen & (fate < 0.8)
        replaced = chosen & (fate >= 0.8) & (fate < 0.9)
        others = torch.randint(self.vocab_size, tokens.shape, generator=generator, device=tokens.device)
        labels = tokens.masked_fill(~chosen, -100)
        corrupted = torch.where(replaced, others, tokens.masked_fill(hidden, MASK))
        return corrupted, labels


subject = Subject(
    kind="masking",
    name="masking with one draw",
    build=lambda c: Masking(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randint(2, 11, (2, 9)), 0))
