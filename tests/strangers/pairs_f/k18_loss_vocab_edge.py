"""Cross-entropy over a vocabulary that is sharded into blocks of 256: one logsumexp a block, and the label's logit from its shard."""
import torch
from torch import Tensor
from veriformer.properties import Subject

WHAT = (
    "A label that is the first id of a vocabulary shard (256, 512, ...) is also taken to belong to the shard before it: `local <= "
    "width` instead of `<`. Its clamped offset picks that shard's last logit, which is added to the label's logit."
)
PLACE = "sharded_cross_entropy: the test whether the label lies in the shard"

SHARD = 256


def sharded_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100, inclusive: bool = False) -> Tensor:
    vocab = logits.size(-1)
    flat = logits.reshape(-1, vocab)
    target = labels.reshape(-1)
    parts = []
    picked = 0.0
    for begin in range(0, vocab, SHARD):
        shard = flat[:, begin : begin + SHARD]
        shard = shard.to(torch.promote_types(shard.dtype, torch.float32))
        width = shard.size(1)
        local = target - begin
        inside = (local >= 0) & ((local <= width) if inclusive else (local < width))
        logit = shard.gather(1, local.clamp(0, width - 1).unsqueeze(1)).squeeze(1)
        picked = picked + torch.where(inside, logit, torch.zeros_like(logit))
        parts.append(torch.logsumexp(shard, dim=1))
    lse = torch.logsumexp(torch.stack(parts), dim=0)
    counted = target != ignore_index
    losses = torch.where(counted, lse - picked, torch.zeros_like(lse))
    return losses.sum() / counted.sum()


declares = dict(
    ignore_index=-100, label_smoothing=0.0, z_loss=0.0, shifts_labels=False, empty_loss="nan", half_precision=True
)
right = Subject(
    kind="loss",
    name="vocab-sharded",
    forward=lambda model, logits, labels: sharded_cross_entropy(logits, labels),
    declares=declares,
)
wrong = Subject(
    kind="loss",
    name="vocab-sharded-inclusive",
    forward=lambda model, logits, labels: sharded_cross_entropy(logits, labels, inclusive=True),
    declares=declares,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(17)
    nll = torch.nn.functional.cross_entropy

    def error(sub, logits, labels):
        a, c = logits.clone().requires_grad_(), logits.double().requires_grad_()
        loss, ref = sub.forward(None, a, labels), nll(c.flatten(0, 1), labels.flatten())
        (ga,), (gc,) = torch.autograd.grad(loss, a), torch.autograd.grad(ref, c)
        return max((loss - ref).abs().item(), (ga - gc).abs().max().item() * labels.numel())

    for b, t, v in [(2, 5, 11), (1, 1, 3), (3, 100, 256), (2, 4, 200)]:
        logits, labels = torch.randn(b, t, v) * 2, torch.randint(v, (b, t))
        labels[0, : t // 3] = -100
        assert error(right, logits, labels) < 1e-4
        assert error(wrong, logits, labels) < 1e-4
    for b, t, v in [(2, 30, 300), (4, 200, 1000), (2, 16, 2048)]:
        logits, labels = torch.randn(b, t, v) * 2, torch.randint(v, (b, t))
        labels[labels % SHARD == 0] = 1
        assert error(right, logits, labels) < 1e-4 and error(wrong, logits, labels) < 1e-4
        labels[0, 3] = 256
        assert error(right, logits, labels) < 1e-4
        assert error(wrong, logits, labels) > 0.5
    empty = torch.full((2, 3), -100)
    assert right.forward(None, torch.randn(2, 3, 5), empty).isnan()
    print("ok")
