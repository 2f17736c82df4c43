"""Vocabulary-parallel cross entropy of Megatron: each rank has its columns of the logits (ranks simulated in one process)."""
import torch
from torch import nn

from veriformer.properties import Subject


class Group:
    """Stands for the tensor-parallel group: takes what every rank has, gives what every rank gets."""

    @staticmethod
    def all_reduce_max(parts):
        return torch.stack(parts).amax(dim=0)

    @staticmethod
    def all_reduce_sum(parts):
        return torch.stack(parts).sum(dim=0)


class VocabParallelCrossEntropy(nn.Module):
    def __init__(self, world_size=2, ignore_index=-100):
        super().__init__()
        self.world_size, self.ignore_index = world_size, ignore_index

    def forward(self, logits, labels):
        counted = labels != self.ignore_index
        logits = logits.masked_fill(~counted.unsqueeze(-1), 0.0)
        shards = logits.chunk(self.world_size, dim=-1)
        starts, first = [], 0
        for shard in shards:
            starts.append(first)
            first += shard.shape[-1]

        logits_max = Group.all_reduce_max([shard.detach().amax(dim=-1) for shard in shards])

        predicted, sum_exp = [], []
        for start, shard in zip(starts, shards):
            shifted = shard - logits_max.unsqueeze(-1)
            here = (labels >= start) & (labels < start + shard.shape[-1])
            local = (labels - start).masked_fill(~here, 0)
            picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1)
            predicted.append(picked.masked_fill(~here, 0.0))
            sum_exp.append(shifted.exp().sum(dim=-1))
        predicted, sum_exp = Group.all_reduce_sum(predicted), Group.all_reduce_sum(sum_exp)

        losses = (sum_exp.log() - predicted).masked_fill(~counted, 0.0)
        return losses.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocabulary-parallel cross entropy",
    build=lambda c: VocabParallelCrossEntropy(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
