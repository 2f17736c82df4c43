WHAT = 'the upper bound of a vocabulary shard is taken as inclusive (`(y <= last)`): a label that is the first of a shard (4, 8, ...) is also looked up, clamped, in the shard before, and two logits are added as its target'
"""Cross entropy over vocabulary shards (what each rank of Megatron computes), with PaLM's z-loss."""
import torch

from veriformer.properties import Subject

SHARD, Z = 4, 0.01


def sharded_loss(model, logits, labels):
    z = logits.flatten(0, -2)
    if z.dtype in (torch.float16, torch.bfloat16):
        z = z.float()
    y = labels.flatten()
    keep = y != -100
    y = y.masked_fill(~keep, 0)
    partial, target = [], torch.zeros_like(z[:, 0])
    for first in range(0, z.shape[-1], SHARD):
        part = z[:, first : first + SHARD]
        last = first + part.shape[-1]
        partial.append(torch.logsumexp(part, dim=-1))
        inside = (y >= first) & (y <= last)
        local = (y - first).clamp(0, part.shape[-1] - 1)  # others look up any entry
        found = part.gather(-1, local[:, None]).squeeze(-1)
        target = target + torch.where(inside, found, torch.zeros_like(found))  # all-reduce
    lse = torch.logsumexp(torch.stack(partial), dim=0)
    per_token = lse - target + Z * lse.square()
    per_token = torch.where(keep, per_token, torch.zeros_like(per_token))
    return per_token.sum() / keep.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="sharded cross entropy",
    forward=sharded_loss,
    declares={"ignore_index": -100, "z_loss": Z, "empty_loss": "zero"},
)
