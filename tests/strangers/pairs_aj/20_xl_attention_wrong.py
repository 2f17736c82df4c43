WHAT = 'Only the distances of the past (T - 1 .. 0) are made, as in the causal Transformer-XL, though the attention sees both ways: beyond the diagonal the shift reads the position scores of the next query; line 37: `pos_seq = torch.arange(T - 1, -1, -1, device=w.device)`.'
"""Transformer-XL's relative attention for an encoder: content and position scores, the latter shifted into place."""

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(distances, width, dtype):
    channel = torch.arange(0, width, 2, device=distances.device, dtype=torch.float64)
    angle = distances.double()[:, None] / 10000 ** (channel / width)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :width].to(dtype)


def rel_shift(x):
    """Row i moves left until the column of distance 0 stands on the diagonal."""
    B, H, T, L = x.shape
    padded = torch.cat([x.new_zeros(B, H, T, 1), x], dim=-1)
    return padded.view(B, H, L + 1, T)[:, :, 1:].reshape(B, H, T, L)


class RelMultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.q_net = nn.Linear(d_model, d_model, bias=False)
        self.k_net = nn.Linear(d_model, d_model, bias=False)
        self.v_net = nn.Linear(d_model, d_model, bias=False)
        self.r_net = nn.Linear(d_model, d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)
        self.r_r_bias = nn.Parameter(torch.randn(n_head, self.d_head) * 0.1)

    def forward(self, w, mask=None):
        B, T, D = w.shape
        pos_seq = torch.arange(T - 1, -1, -1, device=w.device)
        r = self.r_net(sinusoids(pos_seq, D, w.dtype)).view(-1, self.n_head, self.d_head)
        q, k, v = (net(w).view(B, T, self.n_head, self.d_head) for net in (self.q_net, self.k_net, self.v_net))

        AC = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        BD = torch.einsum("bind,lnd->bnil", q + self.r_r_bias, r)
        BD = rel_shift(BD)[..., :T]
        score = (AC + BD) * self.d_head**-0.5
        if mask is not None:
            score = score.masked_fill(~mask[:, None, None, :], torch.finfo(score.dtype).min)
        vec = torch.einsum("bnij,bjnd->bind", score.softmax(dim=-1), v)
        return self.o_net(vec.reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="relative attention",
    build=lambda c: RelMultiHeadAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "relative"},
)
