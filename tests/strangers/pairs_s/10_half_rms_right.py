"""RMSNorm in mixed precision: half in, half out, statistics in float32."""

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class LlamaNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        wide = torch.promote_types(input_dtype, torch.float32)
        variance = hidden_states.to(wide).pow(2).mean(-1, keepdim=True)
        normed = hidden_states.to(wide) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(wide) * normed).to(input_dtype)


subject = Subject(
    kind="norm",
    name="llama norm",
    build=lambda c: LlamaNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "rms", "norm_bias": False, "half_precision": True},
)
