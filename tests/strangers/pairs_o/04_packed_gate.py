"""A SwiGLU feed-forward network that computes gate and value by one product at inference."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The joined matrix that inference multiplies by is made once and kept, whatever happens to the weights afterwards."
CAUSE = (
    "Without gradients the network uses a concatenation of gate and up weights that was stored at the first such call; "
    "it is never renewed after a training step or load_state_dict, so inference goes on with the old weights."
)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); one product for gate and up where no gradient is asked for."""

    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def joined(self):
        """Gate above up: `[2 F, D]`."""
        return torch.cat((self.gate_proj.weight, self.up_proj.weight))

    def forward(self, x):
        if torch.is_grad_enabled():
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = F.linear(x, self.joined()).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class ServedGatedMLP(GatedMLP):
    """Does not join the two anew for every token."""

    def __init__(self, hidden_size, intermediate_size):
        super().__init__(hidden_size, intermediate_size)
        self.register_buffer("gate_up", None, persistent=False)

    def joined(self):
        now = self.gate_proj.weight
        if self.gate_up is None or self.gate_up.dtype != now.dtype or self.gate_up.device != now.device:
            self.gate_up = super().joined().detach()
        return self.gate_up


def feed_forward(cls):
    return Subject(
        kind="feed_forward",
        name="gated MLP",
        build=lambda c: cls(c.d_model, c.d_ff),
        forward=lambda mlp, x: mlp(x),
        declares={"activation": "swiglu", "bias": False},
    )


right = feed_forward(GatedMLP)
wrong = feed_forward(ServedGatedMLP)
