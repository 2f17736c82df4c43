WHAT = 'the labels are set where the input changed (`inputs != items`), so the tenth of the chosen items that is kept as it is never gets predicted'
import torch

from veriformer.properties import Subject

PAD, MASK, IGNORE = 0, 1, -100


class ItemMasking:
    """BERT4Rec's cloze task: 15 % chosen, of these 80 % hidden, 10 % random, 10 % kept."""

    def __init__(self, num_items, share=0.15):
        self.num_items, self.share = num_items, share

    def __call__(self, items, seed):
        g = torch.Generator().manual_seed(int(seed))

        def chance(p):
            return torch.rand(items.shape, generator=g).to(items.device) < p

        chosen = chance(self.share) & (items != PAD) & (items != MASK)
        hide = chosen & chance(0.8)
        swap = chosen & ~hide & chance(0.5)
        other = torch.randint(2, self.num_items, items.shape, generator=g).to(items.device)
        inputs = torch.where(hide, torch.full_like(items, MASK), items)
        inputs = torch.where(swap, other, inputs)
        labels = items.masked_fill(inputs == items, IGNORE)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT4Rec masking",
    build=lambda c: ItemMasking(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.15, "ignore_index": IGNORE},
)
