import torch

from veriformer.properties import Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3


class DataCollatorForMLM:
    """BERT's masking: of 15 % of the tokens 80 % become [MASK], 10 % a random word, 10 % stay."""

    def __init__(self, vocab_size, mlm_probability=0.15):
        self.vocab_size = vocab_size
        self.mlm_probability = mlm_probability
        self.special = torch.tensor([PAD, CLS, SEP, MASK])

    def __call__(self, inputs, seed):
        rng = torch.Generator().manual_seed(int(seed))
        inputs, labels = inputs.clone(), inputs.clone()

        probability = torch.full(labels.shape, self.mlm_probability)
        probability.masked_fill_(torch.isin(labels, self.special), 0.0)
        chosen = torch.bernoulli(probability, generator=rng).bool()

        dice = torch.rand(labels.shape, generator=rng)
        masked = chosen & (dice < 0.8)
        random = chosen & (dice >= 0.8) & (dice < 0.9)
        labels[~chosen] = -100  # the loss looks at these tokens alone

        inputs[masked] = MASK
        words = torch.randint(MASK + 1, self.vocab_size, labels.shape, generator=rng)
        inputs[random] = words[random]
        return inputs, labels


subject = Subject(
    kind="masking",
    name="MLM collator",
    build=lambda c: DataCollatorForMLM(c.vocab_size),
    forward=lambda m, tokens, seed: m(tokens, seed),
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP, MASK), "mask_probability": 0.15},
)
