WHAT = "shards that do not hold the target add the logit of their clamped index to the predicted one, since `elsewhere` is not masked out before the sum (line 33)"
"""Cross-entropy over a vocabulary that lies in shards, as tensor parallelism has it (the ranks are a loop here)."""
import torch

from veriformer.properties import Subject

SHARDS = 3
IGNORE = -100


def vocab_parallel_cross_entropy(logits, labels):
    logits = logits.reshape(-1, logits.size(-1))
    labels = labels.reshape(-1)
    counted = labels != IGNORE
    target = labels.masked_fill(~counted, 0)

    shards = logits.tensor_split(SHARDS, dim=-1)
    # all-reduce MAX
    peak = torch.stack([s.detach().amax(-1) if s.size(-1) else s.new_full(s.shape[:1], -torch.inf) for s in shards])
    peak = peak.amax(0)

    total = torch.zeros_like(peak)
    predicted = torch.zeros_like(peak)
    first = 0
    for shard in shards:
        width = shard.size(-1)
        if width == 0:
            continue
        local = shard - peak[:, None]
        index = target - first
        own = local.gather(-1, index.clamp(0, width - 1)[:, None]).squeeze(-1)
        # all-reduce SUM
        predicted = predicted + own
        total = total + local.exp().sum(-1)
        first += width

    nll = (total.log() - predicted).masked_fill(~counted, 0.0)
    return nll.sum() / counted.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="vocab parallel loss",
    forward=lambda model, logits, labels: vocab_parallel_cross_entropy(logits, labels),
    declares={"ignore_index": IGNORE, "label_smoothing": 0.0, "empty_loss": "zero"},
)
