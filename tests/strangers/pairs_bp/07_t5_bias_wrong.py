WHAT = "max_exact is taken before num_buckets is halved for the two directions (line 23), so all buckets of a direction are exact ones, none is left for the logarithmic part, and distances 3 to 5 fall into the wrong bucket."
import math

import torch
from torch import nn

from veriformer.properties import Subject

NUM_BUCKETS, MAX_DISTANCE = 8, 16


class RelativePositionBias(nn.Module):
    """Bias of the T5 encoder, one table for all its layers."""

    def __init__(self, n_heads, num_buckets=NUM_BUCKETS, max_distance=MAX_DISTANCE):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, n_heads)

    def _bucket(self, relative_position):
        num_buckets = self.num_buckets
        max_exact = num_buckets // 2
        num_buckets //= 2
        ret = (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
        is_small = n < max_exact
        val_if_large = max_exact + (
            torch.log(n.clamp(min=1).double() / max_exact) / math.log(self.max_distance / max_exact) * (num_buckets - max_exact)
        ).long()
        val_if_large = val_if_large.clamp(max=num_buckets - 1)
        return ret + torch.where(is_small, n, val_if_large)

    def forward(self, qlen, klen):
        device = self.relative_attention_bias.weight.device
        context = torch.arange(qlen, device=device)[:, None]
        memory = torch.arange(klen, device=device)[None, :]
        return self.relative_attention_bias(self._bucket(memory - context)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 encoder bias",
    build=lambda c: RelativePositionBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": NUM_BUCKETS, "max_distance": MAX_DISTANCE},
)
