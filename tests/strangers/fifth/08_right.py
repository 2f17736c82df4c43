"""RMSNorm as in LLaMA: statistics in float32 at least, the result in the type of the input."""

import torch
from torch import nn

from veriformer.properties import Subject


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        compute_dtype = torch.promote_types(input_dtype, torch.float32)
        wide_states = hidden_states.to(compute_dtype)
        variance = wide_states.pow(2).mean(-1, keepdim=True)
        wide_states = wide_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * wide_states.to(input_dtype)


subject = Subject(
    kind="norm",
    name="LlamaRMSNorm",
    build=lambda c: LlamaRMSNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "rms", "norm_bias": False, "half_precision": True},
)
