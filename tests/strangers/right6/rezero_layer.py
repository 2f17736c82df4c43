"""ReZero in odd containers: dictionaries in lists in dictionaries; scores scaled and masked in place."""
from collections import OrderedDict

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class ReZeroStack(nn.Module):
    def __init__(self, d, h, f, n):
        super().__init__()
        self.heads = h
        self.tower = nn.ModuleDict()
        for i in reversed(range(n)):  # put in from the last to the first
            self.tower[f"floor {i}"] = nn.ModuleList(
                [
                    nn.ModuleDict(OrderedDict(out=nn.Linear(d, d), fused=nn.Linear(d, 3 * d))),
                    nn.Sequential(OrderedDict(up=nn.Linear(d, f), act=nn.ReLU(inplace=True), down=nn.Linear(f, d))),
                ]
            )
        self.gains = nn.ParameterDict({f"{i}": nn.Parameter(torch.zeros(2)) for i in range(n)})
        self.n = n

    def attend(self, parts, x, hidden):
        b, t, d = x.shape
        k, q, v = parts["fused"](x).view(b, t, 3, d // self.heads, self.heads).permute(2, 0, 4, 1, 3)  # heads innermost
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores.div_((d // self.heads) ** 0.5).masked_fill_(hidden, torch.finfo(x.dtype).min)
        y = torch.matmul(scores.softmax(-1), v)
        return parts["out"](y.permute(0, 2, 3, 1).reshape(b, t, d))

    def forward(self, x, mask=None):
        t = x.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu_(1)[None, None]
        if mask is not None:
            hidden = hidden.logical_or(mask.bool().logical_not()[:, None, None])
        for i in range(self.n):
            parts, feed = self.tower[f"floor {i}"]
            gain = self.gains[str(i)]
            x = torch.addcmul(x, gain[0], self.attend(parts, x, hidden))
            x = torch.addcmul(x, gain[1], feed(x))
        return x


def build(c: DrawnConfig):
    return ReZeroStack(c.d_model, c.num_heads, c.d_ff, c.num_layers)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


declared = Subject(
    kind="layer", name="ReZero", build=build, forward=forward,
    declares={
        "causal": True, "positions": "none", "norm": "none", "residual": True, "activation": "relu",
        "bias": True, "padding_side": "both", "attention_scale": "1/sqrt(d_head)", "final_norm": False,
        "beyond_max_len": "works", "structure": "other",
    },
)
undeclared = Subject(kind="layer", build=build, forward=forward)
