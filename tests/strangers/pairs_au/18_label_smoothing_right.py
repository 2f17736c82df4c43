# fairseq: label_smoothed_cross_entropy, as a mean over the labels that count
import torch

from veriformer.properties import Subject


def label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index):
    target = target.unsqueeze(-1)
    pad_mask = target.eq(ignore_index)
    nll_loss = -lprobs.gather(dim=-1, index=target.masked_fill(pad_mask, 0))
    smooth_loss = -lprobs.sum(dim=-1, keepdim=True)
    nll_loss.masked_fill_(pad_mask, 0.0)
    smooth_loss.masked_fill_(pad_mask, 0.0)
    nll_loss, smooth_loss = nll_loss.sum(), smooth_loss.sum()
    eps_i = epsilon / lprobs.size(-1)
    loss = (1.0 - epsilon) * nll_loss + eps_i * smooth_loss
    return loss / (~pad_mask).sum()


class LabelSmoothedCrossEntropyCriterion(torch.nn.Module):
    def __init__(self, epsilon=0.1, ignore_index=-100):
        super().__init__()
        self.eps, self.ignore_index = epsilon, ignore_index

    def forward(self, net_output, target):
        lprobs = torch.log_softmax(net_output, dim=-1).reshape(-1, net_output.size(-1))
        return label_smoothed_nll_loss(lprobs, target.reshape(-1), self.eps, self.ignore_index)


subject = Subject(
    kind="loss",
    name="label smoothed cross entropy",
    build=lambda c: LabelSmoothedCrossEntropyCriterion(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"label_smoothing": 0.1, "ignore_index": -100, "empty_loss": "nan", "shifts_labels": False},
)
