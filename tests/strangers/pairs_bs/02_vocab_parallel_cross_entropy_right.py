"""Cross entropy over a vocabulary split between ranks (Megatron style), ranks simulated by slices."""

import torch
from torch import nn

from veriformer.properties import Subject


class VocabParallelCrossEntropy(nn.Module):
    def __init__(self, world_size=2, ignore_index=-100):
        super().__init__()
        self.world_size = world_size
        self.ignore_index = ignore_index

    def shards(self, logits):
        start = 0
        for part in logits.tensor_split(self.world_size, dim=-1):
            yield start, start + part.size(-1), part
            start += part.size(-1)

    def forward(self, logits, labels):
        logits = logits.reshape(-1, logits.size(-1))
        labels = labels.reshape(-1)
        counted = labels != self.ignore_index
        labels = labels.masked_fill(~counted, 0)

        # all-reduce MAX
        peak = logits.detach().amax(dim=-1, keepdim=True)

        sum_exp = logits.new_zeros(labels.shape)
        target = logits.new_zeros(labels.shape)
        for start, end, part in self.shards(logits):
            if part.size(-1) == 0:
                continue
            part = part - peak
            foreign = (labels < start) | (labels >= end)
            local = (labels - start).clamp(0, part.size(-1) - 1)
            picked = part.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            # all-reduce SUM, both
            target = target + picked.masked_fill(foreign, 0.0)
            sum_exp = sum_exp + part.exp().sum(-1)

        per_token = (sum_exp.log() - target).masked_fill(~counted, 0.0)
        return per_token.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocab-parallel cross entropy",
    build=lambda c: VocabParallelCrossEntropy(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
