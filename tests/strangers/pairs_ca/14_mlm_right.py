import torch

from veriformer.properties import Subject

PAD, MASK, CLS = 0, 1, 2


class Collator:
    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size, self.p = vocab_size, mlm_probability

    def __call__(self, inputs, seed):
        g = torch.Generator().manual_seed(seed)
        inputs, labels = inputs.clone(), inputs.clone()
        probability = torch.full(labels.shape, self.p)
        probability.masked_fill_(inputs < 3, 0.0)
        chosen = torch.bernoulli(probability, generator=g).bool()
        labels[~chosen] = -100
        # 80 %: [MASK]
        replaced = torch.bernoulli(torch.full(labels.shape, 0.8), generator=g).bool() & chosen
        inputs[replaced] = MASK
        # 10 %: a random word
        random = torch.bernoulli(torch.full(labels.shape, 0.5), generator=g).bool() & chosen & ~replaced
        words = torch.randint(3, self.vocab_size, labels.shape, generator=g)
        inputs[random] = words[random]
        # 10 %: as it was
        return inputs, labels


subject = Subject(
    kind="masking",
    name="BERT collator",
    build=lambda c: Collator(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": 1, "special_ids": [0, 1, 2], "mask_probability": 0.15, "ignore_index": -100},
)
