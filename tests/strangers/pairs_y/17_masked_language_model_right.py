import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

PAD, CLS, SEP, MASK = 0, 1, 2, 3
SPECIAL = (PAD, CLS, SEP, MASK)


class MaskedLanguageModelCollator(nn.Module):
    """BERT's: 15 % are to be predicted; of them 80 % are hidden, 10 % exchanged, 10 % left."""

    def __init__(self, vocab_size, probability=0.15):
        super().__init__()
        if vocab_size <= len(SPECIAL):
            raise ValueError("there is nothing but special tokens")
        self.vocab_size = vocab_size
        self.probability = probability

    def forward(self, tokens, seed):
        generator = torch.Generator().manual_seed(seed)

        def happens(p):
            return torch.rand(tokens.shape, generator=generator).to(tokens.device) < p

        special = torch.zeros_like(tokens, dtype=torch.bool)
        for number in SPECIAL:
            special |= tokens == number

        chosen = happens(self.probability) & ~special
        labels = tokens.masked_fill(~chosen, -100)

        hidden = happens(0.8) & chosen
        inputs = tokens.masked_fill(hidden, MASK)

        exchanged = happens(0.5) & chosen & ~hidden
        words = torch.randint(0, self.vocab_size, tokens.shape, generator=generator).to(tokens)
        inputs = torch.where(exchanged, words, inputs)
        return inputs, labels


subject = Subject(
    kind="masking",
    name="masking for a masked language model",
    build=lambda c: MaskedLanguageModelCollator(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={
        "mask_id": MASK,
        "special_ids": SPECIAL,
        "mask_probability": 0.15,
        "ignore_index": -100,
    },
)
