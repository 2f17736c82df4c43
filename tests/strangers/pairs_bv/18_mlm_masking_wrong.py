WHAT = "labels are the input tensor itself, not a copy, and the input is masked in place afterwards, so the label of a hidden position is the mask token (or the random one), and the caller's batch is destroyed (line 18: inputs, labels = inputs, inputs)"
import torch
import torch.nn as nn

from veriformer.properties import Subject


MASK_ID, SPECIAL = 1, (0, 1, 2)


class MaskTokens(nn.Module):
    def __init__(self, vocab_size, p=0.15):
        super().__init__()
        self.vocab_size, self.p = vocab_size, p

    def forward(self, inputs, seed):
        g = torch.Generator().manual_seed(int(seed))
        inputs, labels = inputs, inputs
        special = torch.isin(inputs, torch.tensor(SPECIAL))
        chosen = (torch.rand(inputs.shape, generator=g) < self.p) & ~special
        replaced = chosen & (torch.rand(inputs.shape, generator=g) < 0.8)
        inputs[replaced] = MASK_ID
        random = chosen & ~replaced & (torch.rand(inputs.shape, generator=g) < 0.5)
        words = torch.randint(len(SPECIAL), self.vocab_size, inputs.shape, generator=g)
        inputs[random] = words[random]
        return inputs, labels.masked_fill(~chosen, -100)


subject = Subject(
    kind="masking",
    build=lambda c: MaskTokens(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK_ID, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
    domain={"vocab_size": (40, 64)},
)
