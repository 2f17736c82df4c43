WHAT = "sines and cosines are laid out as for halves (repeat) while the pairs that are rotated are interleaved: the two channels of a pair get different angles, nothing is rotated (line 23)"
"""GPT-J: one LayerNorm a block, attention and feed-forward in parallel, the first `rotary_dim` channels rotated in pairs."""
import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_DIM = 4


def fixed_pos_embedding(dim, seq_len, like):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
    sinusoid = torch.einsum("i,j->ij", torch.arange(seq_len, dtype=torch.float64), inv_freq)
    return torch.sin(sinusoid).to(like), torch.cos(sinusoid).to(like)


def rotate_every_two(x):
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def duplicate(m):
    return m.repeat(*[1] * (m.ndim - 1), 2)


def apply_rotary_pos_emb(x, sin, cos):
    # x [B, T, H, R], sin and cos [T, R/2]
    sin, cos = (duplicate(t)[None, :, None, :] for t in (sin, cos))
    return (x * cos) + (rotate_every_two(x) * sin)


class GPTJAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.heads, self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        sin, cos = fixed_pos_embedding(ROTARY_DIM, T, x)
        k_rot, k_pass = k[..., :ROTARY_DIM], k[..., ROTARY_DIM:]
        q_rot, q_pass = q[..., :ROTARY_DIM], q[..., ROTARY_DIM:]
        k = torch.cat([apply_rotary_pos_emb(k_rot, sin, cos), k_pass], dim=-1)
        q = torch.cat([apply_rotary_pos_emb(q_rot, sin, cos), q_pass], dim=-1)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        scores = torch.matmul(q, k.transpose(-1, -2)) / self.head_dim**0.5
        causal = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
        attended = torch.matmul(scores.softmax(-1), v)
        return self.out_proj(attended.permute(0, 2, 1, 3).reshape(B, T, D))


class GPTJBlock(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = GPTJAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, dim))

    def forward(self, hidden):
        residual = hidden
        hidden = self.ln_1(hidden)
        return self.attn(hidden) + self.mlp(hidden) + residual


class GPTJForCausalLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList([GPTJBlock(dim, heads, inner) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, input_ids):
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden))


subject = Subject(
    kind="decoder",
    name="GPT-J",
    build=lambda c: GPTJForCausalLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "rotary_dim": ROTARY_DIM,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "output_bias": True,
        "tied": False,
        "structure": "other",
    },
)
