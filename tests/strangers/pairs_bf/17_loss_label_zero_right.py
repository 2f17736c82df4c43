"""Cross-entropy over a large vocabulary: only the rows that count are brought to float32."""
import torch
from torch import nn

from veriformer.properties import Subject


class MaskedLMLoss(nn.Module):
    ignore_index = -100

    def forward(self, logits, labels):
        logits, labels = logits.flatten(0, 1), labels.flatten()
        active = labels != self.ignore_index
        rows = logits[active]
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        picked = wide.gather(-1, labels[active][:, None]).squeeze(-1)
        per_token = wide.logsumexp(-1) - picked
        return per_token.sum() / active.sum().clamp(min=1)


subject = Subject(
    kind="loss",
    name="masked LM loss",
    build=lambda c: MaskedLMLoss(),
    forward=lambda m, logits, labels: m(logits, labels),
    declares={"ignore_index": -100, "empty_loss": "zero"},
)
