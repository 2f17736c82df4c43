WHAT = 'labels are set where the input was changed instead of where a token was chosen: the tenth that is chosen and kept (and what is replaced by itself) is never predicted, so the share is 0.27 and not 0.3 (line 18).'
import torch
from veriformer.properties import Subject

PAD, CLS, MASK, VOCAB = 0, 1, 2, 11


def bert_masking(tokens, seed, share=0.3):
    """80 % of what is chosen becomes MASK, 10 % any word, 10 % stays."""
    g = torch.Generator().manual_seed(int(seed))
    chosen = torch.rand(tokens.shape, generator=g) < share
    fate = torch.rand(tokens.shape, generator=g)
    words = torch.randint(3, VOCAB, tokens.shape, generator=g)
    chosen, fate, words = chosen.to(tokens.device), fate.to(tokens.device), words.to(tokens.device)
    chosen &= (tokens != PAD) & (tokens != CLS) & (tokens != MASK)
    inputs = torch.where(chosen & (fate < 0.8), torch.full_like(tokens, MASK), tokens)
    inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words.to(tokens.dtype), inputs)
    labels = tokens.masked_fill(inputs == tokens, -100)
    return inputs, labels


subject = Subject(
    kind="masking",
    build=lambda c: bert_masking,
    forward=lambda m, tokens, seed: m(tokens, seed),
    domain={"vocab_size": [11]},
    declares={"mask_id": MASK, "special_ids": (PAD, CLS, MASK), "mask_probability": 0.3, "ignore_index": -100},
)
