import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("A vocabulary shard takes the label just past its end for its own (local <= width for <): for the first id of "
        "every later shard the last logit of the shard before is added to the logit of the label.")
PLACE = "vocabulary-sharded cross-entropy, the test whether a label lies in the shard"
SHARD = 4


class ShardedCrossEntropy(nn.Module):
    """Cross-entropy over a vocabulary in shards, as in tensor parallelism; here the shards are slices."""

    def __init__(self, buggy=False):
        super().__init__()
        self.buggy = buggy

    def forward(self, logits, labels):
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        top = logits.detach().amax(-1)
        total, target = 0.0, 0.0
        for start in range(0, logits.shape[-1], SHARD):
            part = logits[..., start:start + SHARD] - top[..., None]
            width = part.shape[-1]
            local = labels - start
            mine = (local >= 0) & ((local <= width) if self.buggy else (local < width))
            got = part.gather(-1, local.clamp(0, width - 1)[..., None])[..., 0]
            target = target + got.masked_fill(~mine, 0.0)
            total = total + part.exp().sum(-1)
        counted = labels != -100
        each = (total.log() - target).masked_fill(~counted, 0.0)
        return each.sum() / counted.sum().clamp(min=1)


FACTS = {"ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"}
right = Subject(kind="loss", build=lambda c: ShardedCrossEntropy(), declares=FACTS, name="sharded")
wrong = Subject(kind="loss", build=lambda c: ShardedCrossEntropy(True), declares=FACTS, name="sharded")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = torch.randn(1, 1, 11, dtype=torch.float64)
    gap = {}
    for label in range(11):
        lab = torch.tensor([[label]])
        naive = -(logits[0, 0, label].exp() / logits.exp().sum()).log()
        gap[label] = [(ShardedCrossEntropy(b)(logits, lab) - naive).abs().item() for b in (False, True)]
    print(gap)
    assert all(g[0] < 1e-12 for g in gap.values())
    assert all((g[1] > 1e-3) == (label in (4, 8)) for label, g in gap.items())
    logits, labels = torch.randn(3, 7, 11, dtype=torch.float64), torch.randint(11, (3, 7))
    labels[0, 3:] = -100
    p = logits.softmax(-1).flatten(0, 1)
    keep = labels.flatten() != -100
    naive = -p[keep].gather(1, labels.flatten()[keep][:, None]).log().mean()
    two = [(ShardedCrossEntropy(b)(logits, labels) - naive).abs().item() for b in (False, True)]
    print(two)
    assert two[0] < 1e-12 and two[1] > 1e-3
