"""Causal language model loss that shifts by itself: logits at t are held against the label at t + 1; label -1 is ignored.

Unusual: the labels are those of the inputs, unshifted, and the last position's logits meet nothing; a sequence of one token has
nothing to predict and its loss is NaN, the mean of nothing, as in torch.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class ForCausalLMLoss(nn.Module):
    ignore_index = -1

    def forward(self, logits, labels):
        if logits.dtype in (torch.half, torch.bfloat16):
            logits = logits.float()
        # the last token has no successor: pad the labels on the right and drop the first, logits stay as they lie
        shifted = F.pad(labels, (0, 1), value=self.ignore_index)[..., 1:].contiguous()
        log_probs = F.log_softmax(logits.reshape(-1, logits.size(-1)), dim=-1)
        return F.nll_loss(log_probs, shifted.view(-1), ignore_index=self.ignore_index)


COMMON = dict(kind="loss", build=lambda c: ForCausalLMLoss(), forward=lambda m, logits, labels: m(logits, labels))
undeclared = Subject(**COMMON)
declared = Subject(**COMMON, declares={"ignore_index": -1, "shifts_labels": True, "empty_loss": "nan"})
