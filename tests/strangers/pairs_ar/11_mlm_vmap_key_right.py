"""BERT masking, 80/10/10; the JAX original is vmapped over the batch."""
import torch
from torch import nn

from veriformer.properties import Subject

PAD, MASK, FIRST = 0, 1, 2


def mask_one(row, vocab_size, key):
    special = (row == PAD) | (row == MASK)
    chosen = (torch.rand(row.shape, generator=key) < 0.15).to(row.device) & ~special
    how = torch.rand(row.shape, generator=key).to(row.device)
    noise = torch.randint(FIRST, vocab_size, row.shape, generator=key).to(row.device)
    inputs = torch.where(chosen & (how < 0.8), MASK, row)
    inputs = torch.where(chosen & (how >= 0.8) & (how < 0.9), noise, inputs)
    return inputs, torch.where(chosen, row, -100)


class Masker(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, tokens, seed):
        root = torch.Generator().manual_seed(int(seed))
        keys = torch.randint(2**62, (tokens.shape[0],), generator=root).tolist()  # random.split
        pairs = [
            mask_one(row, self.vocab_size, torch.Generator().manual_seed(key)) for row, key in zip(tokens, keys)
        ]
        inputs, labels = zip(*pairs)
        return torch.stack(inputs), torch.stack(labels)


subject = Subject(
    kind="masking",
    name="vmapped masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, MASK), "mask_probability": 0.15, "ignore_index": -100},
)
