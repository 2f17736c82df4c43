WHAT = 'labels are set where the collated input differs from the tokens (line 25), so that the tenth that is selected and kept, and random words that hit the original, are never predicted: the share is about 0.134, not 0.15'
import torch

from veriformer.properties import Subject

SPECIAL = (0, 1, 2, 3)  # <s> <pad> </s> <mask>


class DataCollatorForLanguageModeling:
    def __init__(self, vocab_size, mask_id=3, probability=0.15):
        if vocab_size <= len(SPECIAL) + 1:
            raise ValueError("no words to draw from")
        self.vocab_size, self.mask_id, self.probability = vocab_size, mask_id, probability

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))
        inputs = tokens.clone()
        special = torch.isin(tokens, torch.tensor(SPECIAL))
        chosen = (torch.rand(tokens.shape, generator=generator) < self.probability) & ~special
        how = torch.rand(tokens.shape, generator=generator)
        words = torch.randint(len(SPECIAL), self.vocab_size, tokens.shape, generator=generator)
        inputs[chosen & (how < 0.8)] = self.mask_id
        swapped = chosen & (how >= 0.8) & (how < 0.9)
        inputs[swapped] = words[swapped]
        labels = tokens.masked_fill(inputs == tokens, -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="mlm collator",
    build=lambda c: DataCollatorForLanguageModeling(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": 3, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
