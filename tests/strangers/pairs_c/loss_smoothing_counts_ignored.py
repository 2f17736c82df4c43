
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    """Cross-entropy with label smoothing 0.1, mean over the labels that are not -100; zero if there is none."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.eps = bug, 0.1

    def forward(self, logits, labels):
        logp = logits.log_softmax(-1)
        real = labels != -100
        nll = -logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        smooth = -logp.mean(-1)
        nll = nll.masked_fill(~real, 0)
        if not self.bug:
            smooth = smooth.masked_fill(~real, 0)
        return ((1 - self.eps) * nll.sum() + self.eps * smooth.sum()) / real.sum().clamp(min=1)


WHAT = 'The smoothing term is summed over ignored positions too (only the likelihood term is masked), so logits at label -100 change the loss and get gradient.'
PLACE = 'label smoothing of the loss'


def make(bug):
    return Subject(
        kind="loss",
        build=lambda c: Net(c, bug),
        forward=lambda m, logits, labels: m(logits, labels),
        declares={'label_smoothing': 0.1, 'ignore_index': -100, 'empty_loss': 'zero', 'shifts_labels': False},
    )


right, wrong = make(False), make(True)
