"""Cross-entropy with label smoothing over a vocabulary that lies in shards (as in Megatron), here on one device."""
import torch

from veriformer.properties import Subject

SHARD, EPS, IGNORE = 4, 0.1, -100


def vocab_sharded_cross_entropy(logits, labels):
    """logits [B, T, V], labels [B, T]; the mean over the labels that count."""
    vocab = logits.shape[-1]
    shards = logits.split(SHARD, dim=-1)
    # all-reduce MAX
    top = torch.stack([s.amax(-1) for s in shards]).amax(0).detach()
    # all-reduce SUM of exp, of the label's logit (0 on shards that do not have it), and of all logits
    sum_exp = torch.zeros_like(top)
    predicted = torch.zeros_like(top)
    sum_logits = torch.zeros_like(top)
    start = 0
    for s in shards:
        s = s - top[..., None]
        sum_exp = sum_exp + s.exp().sum(-1)
        local = labels - start
        mine = (local >= 0) & (local < s.shape[-1])
        picked = s.gather(-1, local.clamp(0, s.shape[-1] - 1)[..., None])[..., 0]
        predicted = predicted + torch.where(mine, picked, torch.zeros_like(picked))
        sum_logits = sum_logits + s.sum(-1)
        start += s.shape[-1]
    log_z = sum_exp.log()
    nll = log_z - predicted
    smooth = log_z - sum_logits / vocab
    loss = (1 - EPS) * nll + EPS * smooth
    counts = labels != IGNORE
    return torch.where(counts, loss, torch.zeros_like(loss)).sum() / counts.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="sharded cross-entropy",
    forward=lambda model, logits, labels: vocab_sharded_cross_entropy(logits, labels),
    declares={"label_smoothing": EPS, "ignore_index": IGNORE, "empty_loss": "zero"},
)
