WHAT = "shard() pads the vocabulary to a multiple of the number of ranks with logits of 0 in place of -inf, so the padding columns enter the all-reduced sum of exponentials"
import torch
from torch.nn import functional as F
from veriformer.properties import Subject

RANKS = 4


def shard(logits):
    short = -logits.size(-1) % RANKS
    return F.pad(logits, (0, short), value=0.0).chunk(RANKS, -1)


def vocab_parallel_cross_entropy(logits, labels, ignore_index=-100):
    """As in Megatron, ranks in a list: each sees its slice of the vocabulary, three all-reduces."""
    local = shard(logits.flatten(0, 1))
    labels = labels.flatten()
    counted = labels != ignore_index
    target = labels.masked_fill(~counted, 0)

    peak = torch.stack([part.amax(-1) for part in local]).amax(0).detach()  # all-reduce: max
    total, picked, first = 0.0, 0.0, 0
    for part in local:
        size = part.size(-1)
        mine = (target >= first) & (target < first + size)
        where = (target - first).masked_fill(~mine, 0)
        shifted = part - peak[:, None]
        total = total + shifted.exp().sum(-1)  # all-reduce: sum
        value = shifted.gather(1, where[:, None]).squeeze(1)
        picked = picked + torch.where(mine, value, torch.zeros_like(value))  # all-reduce: sum
        first += size
    nll = (total.log() - picked) * counted
    return nll.sum() / counted.sum().clamp(min=1)


subject = Subject(kind="loss", forward=lambda model, logits, labels: vocab_parallel_cross_entropy(logits, labels),
                  declares={"ignore_index": -100, "empty_loss": "zero"})
