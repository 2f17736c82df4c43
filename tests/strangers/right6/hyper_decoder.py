"""Hyper-connections: three streams in place of one residual, read, written and mixed by learned weights."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

STREAMS = 3


class HyperConnection(nn.Module):
    def __init__(self, index):
        super().__init__()
        read = torch.zeros(STREAMS)
        read[index % STREAMS] = 1.0
        self.read = nn.Parameter(read + 0.1 * torch.randn(STREAMS))
        self.write = nn.Parameter(torch.ones(STREAMS) + 0.1 * torch.randn(STREAMS))
        self.mix = nn.Parameter(torch.eye(STREAMS) + 0.1 * torch.randn(STREAMS, STREAMS))

    def forward(self, streams, fn):  # [S, B, T, D]
        y = fn(torch.tensordot(self.read, streams, dims=1))
        return torch.tensordot(self.mix, streams, dims=1) + self.write.view(-1, 1, 1, 1) * y


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm, self.h = nn.RMSNorm(d, eps=1e-6), h
        self.w = nn.ParameterList([nn.Parameter(torch.randn(d, d) * d**-0.5) for _ in range(4)])

    def forward(self, x, see):
        b, t, d = x.shape
        x = self.norm(x)
        q, k, v = ((x @ w).view(b, t, self.h, -1).transpose(1, 2) for w in self.w[:3])
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return y.transpose(1, 2).reshape(b, t, d) @ self.w[3]


class Hyper(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.tok, self.pos = nn.Embedding(c.vocab_size, d), nn.Parameter(torch.randn(c.max_len, d))
        self.attn = nn.ModuleList([Attention(d, c.num_heads) for _ in range(c.num_layers)])
        self.ffn = nn.ModuleList(
            [
                nn.Sequential(
                    nn.RMSNorm(d, eps=1e-6), nn.Linear(d, c.d_ff, bias=False), nn.ReLU(), nn.Linear(c.d_ff, d, bias=False)
                )
                for _ in range(c.num_layers)
            ]
        )
        self.hc = nn.ModuleList([HyperConnection(i) for i in range(2 * c.num_layers)])
        self.norm, self.head = nn.RMSNorm(d, eps=1e-6), nn.Linear(d, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        b, t = tokens.shape
        if t > self.pos.shape[0]:
            raise ValueError("too long")
        see = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if mask is not None:
            see = see & mask[:, None, None].bool() | torch.eye(t, dtype=torch.bool, device=tokens.device)
        streams = (self.tok(tokens) + self.pos[:t]).expand(STREAMS, -1, -1, -1)
        for i, (attn, ffn) in enumerate(zip(self.attn, self.ffn)):
            streams = self.hc[2 * i](streams, lambda x, attn=attn: attn(x, see))
            streams = self.hc[2 * i + 1](streams, ffn)
        return self.head(self.norm(streams.sum(0)))


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="decoder", name="hyper-connections", build=Hyper, forward=forward,
    declares={
        "causal": True, "positions": "learned", "norm": "rms", "norm_placement": "other", "final_norm": True,
        "activation": "relu", "bias": False, "output_bias": False, "tied": False, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "error", "structure": "other", "embedding_scale": False,
    },
)
undeclared = Subject(kind="decoder", build=Hyper, forward=forward)
