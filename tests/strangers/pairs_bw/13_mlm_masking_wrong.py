WHAT = "inputs alias the tokens (tokens.contiguous() copies nothing), so the in-place corruption is done before labels are read: the labels are what stands in the input, [MASK] among them, and the caller's batch is overwritten"
import torch
from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class Collator:
    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size, self.probability = vocab_size, probability

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        draw = lambda: torch.rand(tokens.shape, generator=g).to(tokens.device)
        special = (tokens == PAD) | (tokens == CLS) | (tokens == SEP)
        chosen = (draw() < self.probability) & ~special
        how = draw()
        words = torch.randint(MASK + 1, self.vocab_size, tokens.shape, generator=g).to(tokens)

        inputs = tokens.contiguous()
        inputs[chosen & (how < 0.8)] = MASK
        swapped = chosen & (how >= 0.8) & (how < 0.9)
        inputs[swapped] = words[swapped]
        labels = torch.where(chosen, tokens, torch.full_like(tokens, -100))
        return inputs, labels


subject = Subject(kind="masking", build=lambda c: Collator(c.vocab_size), forward=lambda m, tokens, seed: m(tokens, seed),
                  declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP), "mask_probability": 0.15, "ignore_index": -100})
