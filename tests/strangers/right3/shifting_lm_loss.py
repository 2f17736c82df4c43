"""A causal language-model loss that shifts by itself, as Hugging Face models do."""
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class CausalLoss(nn.Module):
    def forward(self, logits, labels):
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
        counted = (shifted != -100).sum().clamp(min=1)
        total = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100, reduction="sum")
        return total / counted

common = dict(kind="loss", build=lambda c: CausalLoss(), forward=lambda m, logits, labels: m(logits, labels))
undeclared = Subject(**common)
declared = Subject(**common, declares={"shifts_labels": True, "ignore_index": -100, "label_smoothing": 0.0, "empty_loss": "zero"})
