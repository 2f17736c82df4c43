WHAT = 'In vocabulary-parallel cross-entropy each shard subtracts its own maximum (line 26: the all-reduce of the maximum is missing) before the sums of exponentials of the shards are added: they are of different scales, and the logit of the target is shifted by yet another amount.'
"""Cross-entropy over a vocabulary that is split over ranks, after Megatron (the ranks are a list here)."""
import torch

from veriformer.properties import Subject

WORLD_SIZE = 2
IGNORE = -100


def all_reduce_max(values):
    return [torch.stack(values).amax(0)] * len(values)


def all_reduce_sum(values):
    return torch.stack(values).sum(0)


def vocab_parallel_cross_entropy(model, logits, labels):
    vocab = logits.shape[-1]
    per_rank = -(-vocab // WORLD_SIZE)
    shards = logits.split(per_rank, dim=-1)
    starts = [i * per_rank for i in range(len(shards))]

    logits_max = [s.detach().amax(-1) for s in shards]
    shards = [s - m.unsqueeze(-1) for s, m in zip(shards, logits_max)]

    predicted, sum_exp = [], []
    for start, shard in zip(starts, shards):
        outside = (labels < start) | (labels >= start + shard.shape[-1])
        local = (labels - start).masked_fill(outside, 0)
        picked = shard.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        predicted.append(picked.masked_fill(outside, 0.0))
        sum_exp.append(shard.exp().sum(-1))

    loss = all_reduce_sum(sum_exp).log() - all_reduce_sum(predicted)
    counted = labels != IGNORE
    return loss.masked_fill(~counted, 0.0).sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocab-parallel cross-entropy",
    forward=vocab_parallel_cross_entropy,
    declares={"ignore_index": IGNORE, "empty_loss": "zero", "shifts_labels": False},
)
