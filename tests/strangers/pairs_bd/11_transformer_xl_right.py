"""Self-attention of Transformer-XL without memory: content and position terms, the position term moved by rel_shift."""

import torch
from torch import nn

from veriformer.properties import Subject


class RelPartialLearnableMultiHeadAttn(nn.Module):
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
        self.d_model = d_model

    def positional_embedding(self, pos_seq):
        inv_freq = 1.0 / 10000 ** (torch.arange(0.0, self.d_model, 2.0, device=pos_seq.device) / self.d_model)
        angles = pos_seq[:, None] * inv_freq[None, :]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, : self.d_model]

    @staticmethod
    def rel_shift(x):
        b, n, i, j = x.shape
        x = torch.cat([x.new_zeros(b, n, i, 1), x], dim=-1)
        return x.reshape(b, n, j + 1, i)[:, :, 1:].reshape(b, n, i, j)

    def forward(self, x, attention_mask=None):
        bsz, qlen, _ = x.shape
        split = lambda y: y.view(*y.shape[:-1], self.n_head, self.d_head)  # noqa: E731
        pos_seq = torch.arange(qlen - 1, -1, -1.0, device=x.device)
        r = split(self.r_net(self.positional_embedding(pos_seq).to(x.dtype)))
        q, k, v = split(self.q_net(x)), split(self.k_net(x)), split(self.v_net(x))

        ac = torch.einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        bd = self.rel_shift(torch.einsum("bind,jnd->bnij", q + self.r_r_bias, r))
        score = (ac + bd) / self.d_head**0.5

        seen = torch.ones(qlen, qlen, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            itself = torch.eye(qlen, dtype=torch.bool, device=x.device)
            seen = seen & (attention_mask[:, None, None, :].bool() | itself)
        prob = score.masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("bnij,bjnd->bind", prob, v)
        return self.o_net(out.reshape(bsz, qlen, -1))


subject = Subject(
    kind="self_attention",
    name="Transformer-XL attention",
    build=lambda c: RelPartialLearnableMultiHeadAttn(c.d_model, c.num_heads),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": True, "positions": "relative", "bias": False},
)
