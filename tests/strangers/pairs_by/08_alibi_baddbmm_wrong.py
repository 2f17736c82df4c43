WHAT = "baddbmm's beta is 1/sqrt(d_head) too, so ALiBi's bias is scaled along with the products and all slopes are too small by sqrt(d_head) (line 16)"
# BLOOM's attention: ALiBi goes in through baddbmm.
import math

import torch
from torch import nn

from veriformer.properties import Subject


class AlibiAttention(nn.Module):
    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.beta = self.inv_norm_factor
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, n_head + 1) / n_head), persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        fused = self.query_key_value(x).view(b, t, self.n_head, 3, self.head_dim)
        q, k, v = (fused[..., n, :].transpose(1, 2).reshape(b * self.n_head, t, self.head_dim) for n in range(3))
        steps = torch.arange(t, device=x.device)
        distance = (steps[None, :] - steps[:, None]).to(x.dtype)
        alibi = (self.slopes.to(x.dtype)[:, None, None] * distance).repeat(b, 1, 1)
        scores = torch.baddbmm(alibi, q, k.transpose(1, 2), beta=self.beta, alpha=self.inv_norm_factor)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        probs = scores.masked_fill(future, -torch.inf).softmax(-1)
        context = torch.bmm(probs, v).view(b, self.n_head, t, self.head_dim)
        return self.dense(context.transpose(1, 2).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    name="ALiBi attention",
    build=lambda c: AlibiAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "alibi", "bias": True},
    domain={"num_heads": (1, 2, 4, 8)},
)
