"""BERT's masking, drawn on the CPU from a generator of its own: 15% of the tokens that are not special; of these 80% become
[MASK] (3), 10% a random word, 10% stay. Unusual: some that are to be predicted are unchanged; right, that is BERT's rule."""
import torch
from torch import nn
from veriformer.properties import Subject
MASK, SPECIAL = 3, (0, 1, 2, 3)


class Masking(nn.Module):
    def __init__(s, V):
        super().__init__()
        s.V = V

    def forward(s, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        u, kind = torch.rand(tokens.shape, generator=g), torch.rand(tokens.shape, generator=g)
        words = torch.randint(len(SPECIAL), s.V, tokens.shape, generator=g).to(tokens)
        special = torch.isin(tokens.cpu(), torch.tensor(SPECIAL))
        chosen = ((u < 0.15) & ~special).to(tokens.device)
        kind = kind.to(tokens.device)
        inputs = torch.where(chosen & (kind < 0.8), torch.full_like(tokens, MASK), tokens)
        inputs = torch.where(chosen & (kind >= 0.9), words, inputs)
        return inputs, torch.where(chosen, tokens, torch.full_like(tokens, -100))


args = dict(kind="masking", build=lambda c: Masking(c.vocab_size), forward=lambda m, tokens, seed: m(tokens, seed),
            domain={"vocab_size": [20, 50]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100})
