WHAT = "A rank takes labels up to and including its end (`labels <= stop`, line 28): a label that is the first of the next shard is counted by both ranks, the first adding the logit of its own last entry (index clamped)."
"""Vocabulary-parallel cross-entropy (Megatron), the ranks walked through one after another."""

import torch
from torch import nn

from veriformer.properties import Subject


class VocabParallelCrossEntropy(nn.Module):
    def __init__(self, world_size=2, ignore_index=-100):
        super().__init__()
        self.world_size = world_size
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        shards = logits.chunk(self.world_size, dim=-1)

        # all-reduce (max)
        top = torch.stack([shard.detach().amax(-1) for shard in shards]).amax(0)

        start = 0
        exp_sums, predicted = [], []
        for shard in shards:
            size = shard.size(-1)
            stop = start + size
            shard = shard - top.unsqueeze(-1)
            mine = (labels >= start) & (labels <= stop)
            local = (labels - start).clamp(0, size - 1)
            picked = shard.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            predicted.append(torch.where(mine, picked, torch.zeros_like(picked)))
            exp_sums.append(shard.exp().sum(-1))
            start = stop

        # all-reduce (sum), both
        losses = torch.stack(exp_sums).sum(0).log() - torch.stack(predicted).sum(0)
        counted = labels != self.ignore_index
        return torch.where(counted, losses, torch.zeros_like(losses)).sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocab-parallel cross-entropy",
    build=lambda c: VocabParallelCrossEntropy(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero", "label_smoothing": 0.0},
)
