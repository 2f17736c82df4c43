WHAT = 'Only nll_loss is masked at padding (the line `smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)` is missing), so that the smoothing term counts the ignored positions and their logits are trained.'
import torch

from veriformer.properties import Subject

PAD = 1
EPSILON = 0.1


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    if target.dim() == lprobs.dim() - 1:
        target = target.unsqueeze(-1)
    nll_loss = -lprobs.gather(dim=-1, index=target)
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    pad_mask = target.eq(ignore_index)
    nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
    nll_loss, smooth_loss = nll_loss.sum(), smooth_loss.sum()
    eps_i = epsilon / lprobs.size(-1)
    return (1.0 - epsilon) * nll_loss + eps_i * smooth_loss, nll_loss


class LabelSmoothedCrossEntropyCriterion:
    """fairseq's, with the division by the sample size (which its trainer does) put in here."""

    def __init__(self, label_smoothing, padding_idx):
        self.eps = label_smoothing
        self.padding_idx = padding_idx

    def __call__(self, net_output, target):
        lprobs = torch.log_softmax(net_output, dim=-1).view(-1, net_output.size(-1))
        loss, _ = label_smoothed_nll_loss(lprobs, target.reshape(-1), self.eps, self.padding_idx)
        ntokens = target.ne(self.padding_idx).sum()
        return loss / ntokens.clamp(min=1)


criterion = LabelSmoothedCrossEntropyCriterion(EPSILON, PAD)

subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    forward=lambda model, logits, labels: criterion(logits.contiguous(), labels),
    declares={"label_smoothing": EPSILON, "ignore_index": PAD, "empty_loss": "zero"},
)
