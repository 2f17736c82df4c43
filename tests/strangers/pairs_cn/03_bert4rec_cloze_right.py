"""The Cloze task of BERT4Rec: hide a fifth of a user's items, 80 / 10 / 10."""
import torch
from torch import nn
from veriformer.properties import Subject

PAD, MASK, FIRST_ITEM = 0, 1, 2


class Cloze(nn.Module):
    def __init__(self, num_ids, share=0.2):
        super().__init__()
        self.num_ids, self.share = num_ids, share

    def forward(self, history, seed):
        rng = torch.Generator().manual_seed(int(seed))

        def coin(p):
            return torch.rand(history.shape, generator=rng) < p

        item = (history != PAD) & (history != MASK)
        chosen = coin(self.share) & item
        labels = torch.where(chosen, history, -100)

        hidden = chosen & coin(0.8)
        swapped = chosen & ~hidden & coin(0.5)  # half of what is left
        others = torch.randint(FIRST_ITEM, self.num_ids, history.shape, generator=rng)

        inputs = torch.where(hidden, MASK, history)
        inputs = torch.where(swapped, others, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT4Rec's Cloze",
    build=lambda c: Cloze(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.2},
)
