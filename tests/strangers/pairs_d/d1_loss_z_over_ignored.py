import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("The z-loss is averaged over all positions, ignored ones too, where the cross-entropy is averaged over those that "
        "are predicted: padding's logits are pulled on and the term depends on how much padding there is.")
PLACE = "z-loss term of the loss, mean without the label mask"
Z = 0.05


class ZLoss(nn.Module):
    def __init__(self, buggy=False):
        super().__init__()
        self.buggy = buggy

    def forward(self, logits, labels):
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        counted = labels != -100
        log_z = logits.logsumexp(-1)
        chosen = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        n = counted.sum().clamp(min=1)
        entropy = (log_z - chosen).masked_fill(~counted, 0.0).sum() / n
        square = log_z.square()
        extra = square.mean() if self.buggy else square.masked_fill(~counted, 0.0).sum() / n
        return entropy + Z * extra


FACTS = {"z_loss": Z, "ignore_index": -100, "shifts_labels": False, "empty_loss": "zero"}
right = Subject(kind="loss", build=lambda c: ZLoss(), declares=FACTS, name="z-loss")
wrong = Subject(kind="loss", build=lambda c: ZLoss(True), declares=FACTS, name="z-loss")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits = 2 * torch.randn(2, 6, 11, dtype=torch.float64)
    labels = torch.randint(11, (2, 6))

    def naive(labels):
        terms = []
        for row, lab in zip(logits.flatten(0, 1), labels.flatten().tolist()):
            if lab != -100:
                z = row.exp().sum().log()
                terms.append(z - row[lab] + Z * z * z)
        return sum(terms) / len(terms)

    full = [(ZLoss(b)(logits, labels) - naive(labels)).abs().item() for b in (False, True)]
    labels[1, 2:] = -100
    logits[1, 2:] *= 3
    part = [(ZLoss(b)(logits, labels) - naive(labels)).abs().item() for b in (False, True)]
    x = logits.clone().requires_grad_()
    grads = [torch.autograd.grad(ZLoss(b)(x, labels), x)[0][1, 2:].abs().max().item() for b in (False, True)]
    print(full, part, grads)
    assert max(full) < 1e-12 and part[0] < 1e-12 and part[1] > 1e-2 and grads[0] == 0 and grads[1] > 1e-3
