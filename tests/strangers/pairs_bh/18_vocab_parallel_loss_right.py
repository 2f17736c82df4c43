"""Vocabulary-parallel cross entropy with label smoothing (Megatron): each rank holds a slice of the vocabulary."""
import torch
from torch import nn

from veriformer.properties import Subject


def all_reduce(parts, op):
    out = parts[0]
    for part in parts[1:]:
        out = torch.maximum(out, part) if op == "max" else out + part
    return out


class VocabParallelCrossEntropy(nn.Module):
    def __init__(self, world_size=2, label_smoothing=0.1, ignore_index=-100):
        super().__init__()
        self.world_size, self.label_smoothing, self.ignore_index = world_size, label_smoothing, ignore_index

    def forward(self, logits, labels):
        counted = labels != self.ignore_index
        target = labels.masked_fill(~counted, 0)
        shards = logits.chunk(self.world_size, dim=-1)
        logits_max = all_reduce([s.amax(-1) for s in shards], "max").detach()

        predicted, sum_exp, sum_logits, start = [], [], [], 0
        for shard in shards:
            partition_vocab = shard.size(-1)
            shifted = shard - logits_max.unsqueeze(-1)
            outside = (target < start) | (target >= start + partition_vocab)
            local = (target - start).masked_fill(outside, 0)
            predicted.append(shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0))
            sum_exp.append(shifted.exp().sum(-1))
            sum_logits.append(shifted.sum(-1))
            start += partition_vocab
        vocab_size = start
        log_z = all_reduce(sum_exp, "sum").log()
        nll = log_z - all_reduce(predicted, "sum")
        mean_log_probs = all_reduce(sum_logits, "sum") / vocab_size - log_z
        loss = (1.0 - self.label_smoothing) * nll - self.label_smoothing * mean_log_probs
        return (loss * counted).sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocabulary-parallel cross entropy",
    build=lambda c: VocabParallelCrossEntropy(),
    forward=lambda model, logits, labels: model(logits, labels),
    declares={"ignore_index": -100, "label_smoothing": 0.1, "empty_loss": "zero"},
)
