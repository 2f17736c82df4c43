WHAT = "Chosen tokens that are left as they are get no label, so that only 13.5 % of the tokens are to be predicted and none of them shows itself (line 31)."
import torch

from veriformer.properties import Subject

MASK, SPECIAL = 3, (0, 1, 2, 3)


class Masker:
    """BERT's masking: 15 % are predicted, of these 80 % [MASK], 10 % another word, 10 % unchanged."""

    def __init__(self, vocab_size, probability=0.15):
        self.vocab_size = vocab_size
        self.probability = probability

    def __call__(self, tokens, seed):
        generator = torch.Generator().manual_seed(int(seed))

        def uniform():
            return torch.rand(tokens.shape, generator=generator).to(tokens.device)

        special = torch.isin(tokens, torch.tensor(SPECIAL, device=tokens.device))
        chosen = (uniform() < self.probability) & ~special
        action = uniform()
        hidden = chosen & (action < 0.8)
        swapped = chosen & (action >= 0.8) & (action < 0.9)
        other = torch.randint(self.vocab_size, tokens.shape, generator=generator).to(tokens.device)

        inputs = tokens.masked_fill(hidden, MASK)
        inputs = torch.where(swapped, other, inputs)
        labels = tokens.masked_fill(~(hidden | swapped), -100)
        return inputs, labels


subject = Subject(
    kind="masking",
    build=lambda c: Masker(c.vocab_size),
    forward=lambda model, tokens, seed: model(tokens, seed),
    declares={"mask_id": MASK, "special_ids": SPECIAL, "mask_probability": 0.15, "ignore_index": -100},
)
