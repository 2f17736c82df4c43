import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5RelativeBias(nn.Module):
    """Mesh-TensorFlow's RelativePositionBias, as an encoder has it: half of the buckets for what comes after."""

    def __init__(self, num_heads, num_buckets=32, max_distance=128):
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    @staticmethod
    def _relative_position_bucket(relative_position, num_buckets, max_distance):
        num_buckets //= 2
        max_exact = num_buckets // 2
        relative_buckets = (relative_position > 0).long() * num_buckets
        relative_position = relative_position.abs()
        is_small = relative_position < max_exact
        log_ratio = torch.log(relative_position.clamp(min=1).float() / max_exact) / math.log(max_distance / max_exact)
        if_large = max_exact + (log_ratio * (num_buckets - max_exact)).long()
        if_large = if_large.clamp(max=num_buckets - 1)
        return relative_buckets + torch.where(is_small, relative_position, if_large)

    def forward(self, query_length, key_length):
        device = self.relative_attention_bias.weight.device
        context_position = torch.arange(query_length, device=device)[:, None]
        memory_position = torch.arange(key_length, device=device)[None, :]
        buckets = self._relative_position_bucket(
            memory_position - context_position, self.num_buckets, self.max_distance
        )
        return self.relative_attention_bias(buckets).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 relative bias",
    build=lambda c: T5RelativeBias(c.num_heads),
    forward=lambda model, query_len, key_len: model(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 32, "max_distance": 128},
)
