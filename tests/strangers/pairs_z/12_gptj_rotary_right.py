"""GPT-J: interleaved rotary positions, attention and MLP side by side behind one norm."""
import torch
from torch import nn

from veriformer.properties import Subject


def sinusoid_angles(seq_len, dim, like):
    inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2, dtype=like.dtype, device=like.device) / dim))
    t = torch.arange(seq_len, dtype=like.dtype, device=like.device)
    angles = torch.einsum("i,j->ij", t, inv_freq)
    return torch.repeat_interleave(angles, 2, dim=-1)


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary_pos_emb(x, angles):
    """x [B, T, H, K], angles [T, K]."""
    return x * angles.cos()[None, :, None] + rotate_every_two(x) * angles.sin()[None, :, None]


class GPTJAttention(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, embed_dim // heads
        if self.head_dim % 2:
            raise ValueError("rotary needs pairs of channels")
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.head_dim)
        k = self.k_proj(x).view(B, T, self.heads, self.head_dim)
        v = self.v_proj(x).view(B, T, self.heads, self.head_dim)
        angles = sinusoid_angles(T, self.head_dim, x)
        q, k = apply_rotary_pos_emb(q, angles), apply_rotary_pos_emb(k, angles)
        attn = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        causal = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
        attn = torch.where(causal, attn, torch.finfo(attn.dtype).min).softmax(dim=-1)
        return self.out_proj(torch.einsum("bhqk,bkhd->bqhd", attn, v).reshape(B, T, C))


class GPTJBlock(nn.Module):
    def __init__(self, embed_dim, heads, inner):
        super().__init__()
        self.ln_1 = nn.LayerNorm(embed_dim)
        self.attn = GPTJAttention(embed_dim, heads)
        self.fc_in = nn.Linear(embed_dim, inner)
        self.fc_out = nn.Linear(inner, embed_dim)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        normed = self.ln_1(x)
        return self.attn(normed) + self.fc_out(self.act(self.fc_in(normed))) + x


class GPTJ(nn.Module):
    def __init__(self, vocab_size, embed_dim, heads, layers, inner):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, embed_dim)
        self.h = nn.ModuleList([GPTJBlock(embed_dim, heads, inner) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(embed_dim)
        self.lm_head = nn.Linear(embed_dim, vocab_size)

    def forward(self, input_ids):
        x = self.wte(input_ids)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="GPT-J",
    build=lambda c: GPTJ(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000.0,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "output_bias": True,
        "structure": "other",
    },
)
