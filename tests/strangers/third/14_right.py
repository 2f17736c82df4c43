import torch
import torch.nn as nn
import torch.nn.functional as F


class LabelSmoothedCrossEntropy(nn.Module):
    """Label smoothed cross entropy for sequence to sequence training.

    logits: (batch, time, vocab), target: (batch, time).
    Returns the loss averaged over the tokens which are not padding.
    """

    def __init__(self, smoothing: float = 0.1, ignore_index: int = 0):
        super().__init__()
        self.smoothing = smoothing
        self.ignore_index = ignore_index

    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        vocab = logits.size(-1)
        lprobs = F.log_softmax(logits.reshape(-1, vocab), dim=-1)
        target = target.reshape(-1, 1)

        nll_loss = -lprobs.gather(dim=-1, index=target)
        smooth_loss = -lprobs.sum(dim=-1, keepdim=True)

        pad_mask = target.eq(self.ignore_index)
        nll_loss = nll_loss.masked_fill(pad_mask, 0.0)
        smooth_loss = smooth_loss.masked_fill(pad_mask, 0.0)

        n_tokens = (~pad_mask).sum().clamp(min=1)
        eps_i = self.smoothing / (vocab - 1)
        loss = (1.0 - self.smoothing - eps_i) * nll_loss + eps_i * smooth_loss
        return loss.sum() / n_tokens
