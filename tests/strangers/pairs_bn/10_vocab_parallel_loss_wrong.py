WHAT = 'a shard holds the labels first <= y < last, but y == last is taken for its own too (> in place of >=): labels that are the first of a later shard get the last logit of the shard before added to their own (line 31)'
"""Cross-entropy over a vocabulary that lies in shards, Megatron style (here on one device)."""

import torch

from veriformer.properties import Subject

SHARDS = 3
IGNORE = -100


def vocab_ranges(size):
    per, rest = divmod(size, SHARDS)
    first = 0
    for rank in range(SHARDS):
        last = first + per + (rank < rest)
        if last > first:
            yield first, last
        first = last


def vocab_parallel_cross_entropy(model, logits, labels):
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    target = labels.flatten()

    highest = logits.detach().amax(-1)  # all-reduce MAX
    sum_exp = torch.zeros_like(highest)
    predicted = torch.zeros_like(highest)
    for first, last in vocab_ranges(logits.shape[-1]):
        shard = logits[:, first:last] - highest[:, None]
        outside = (target < first) | (target > last)
        local = (target - first).clamp(0, last - first - 1)
        picked = shard.gather(1, local[:, None]).squeeze(1)
        predicted = predicted + picked.masked_fill(outside, 0.0)  # all-reduce SUM
        sum_exp = sum_exp + shard.exp().sum(-1)  # all-reduce SUM

    counted = target != IGNORE
    losses = (sum_exp.log() - predicted).masked_fill(~counted, 0.0)
    return losses.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocab-parallel cross-entropy",
    forward=vocab_parallel_cross_entropy,
    declares={"ignore_index": IGNORE, "empty_loss": "zero", "shifts_labels": False},
)
