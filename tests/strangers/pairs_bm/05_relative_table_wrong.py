WHAT = "distances are shifted by the current length (max(q_len, k_len) - 1) instead of by max_len - 1, the middle of the table: the same distance reads another row at every length"
"""Learned relative position bias, one table of all distances (Swin, in one dimension)."""
import torch
import torch.nn as nn

from veriformer.properties import Subject


class RelativePositionBias(nn.Module):
    """bias[h, t, s] = table[s - t], distances beyond the table share its ends."""

    def __init__(self, num_heads: int, max_len: int):
        super().__init__()
        self.max_len = max_len
        self.relative_position_bias_table = nn.Parameter(torch.zeros(2 * max_len - 1, num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

    def get_rel_pos_index(self, q_len: int, k_len: int) -> torch.Tensor:
        dev = self.relative_position_bias_table.device
        coords_q = torch.arange(q_len, device=dev)
        coords_k = torch.arange(k_len, device=dev)
        relative_coords = coords_k[None, :] - coords_q[:, None]
        relative_coords = relative_coords + max(q_len, k_len) - 1  # shift to start from 0
        return relative_coords.clamp(0, 2 * self.max_len - 2)

    def forward(self, q_len: int, k_len: int) -> torch.Tensor:
        index = self.get_rel_pos_index(q_len, k_len)
        bias = self.relative_position_bias_table[index.view(-1)].view(q_len, k_len, -1)
        return bias.permute(2, 0, 1).contiguous()


subject = Subject(
    kind="position_bias",
    name="relative table",
    build=lambda c: RelativePositionBias(c.num_heads, c.max_len),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "relative", "bidirectional": True},
)
