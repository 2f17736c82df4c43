"""Cross-entropy of a vocabulary that lies in shards, as on tensor-parallel ranks: each gives its maximum, its sum, its target."""

import torch

from veriformer.properties import Subject

SHARD = 4


class Rank:
    """What one rank knows of all tokens."""

    def __init__(self, logits, first):
        self.logits, self.first = logits, first
        self.best = logits.detach().amax(-1).clamp(min=torch.finfo(logits.dtype).min)
        self.total = (logits - self.best[..., None]).exp().sum(-1)

    def target(self, labels):
        mine = (labels >= self.first) & (labels < self.first + self.logits.shape[-1])
        local = (labels - self.first).where(mine, torch.zeros_like(labels))
        return self.logits.gather(-1, local[..., None])[..., 0].where(mine, self.logits.new_zeros(()))


def all_reduce(parts, how):
    return how(torch.stack(parts), 0)


def vocab_parallel_cross_entropy(logits, labels):
    ranks = [Rank(part, i * SHARD) for i, part in enumerate(logits.split(SHARD, dim=-1))]
    best = all_reduce([r.best for r in ranks], torch.amax)
    total = all_reduce([r.total * (r.best - best).exp() for r in ranks], torch.sum)
    target = all_reduce([r.target(labels) for r in ranks], torch.sum)
    each = best + total.log() - target
    counted = labels != -100
    return each.where(counted, each.new_zeros(())).sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    forward=lambda model, logits, labels: vocab_parallel_cross_entropy(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
