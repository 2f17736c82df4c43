"""A small Llama (grouped queries, rotary, SwiGLU). The decode loop was extended to prefill long prompts in chunks."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def apply_rotary(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    inv_freq = base ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = positions.to(x.dtype)[:, None] * inv_freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        if self.head_dim % 2:
            raise ValueError("rotary needs an even head_dim")
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, start_pos, past):
        bsz, t, _ = x.shape
        positions = torch.arange(start_pos, start_pos + t, device=x.device)
        q = self.wq(x).view(bsz, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(bsz, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(bsz, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, positions), apply_rotary(k, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        present = (k, v)
        groups = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        visible = torch.ones(t, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.wo(y.transpose(1, 2).reshape(bsz, t, -1)), present


class TransformerBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.w1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, start_pos, past):
        attended, present = self.attention(self.attention_norm(x), start_pos, past)
        h = x + attended
        z = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(z)) * self.w3(z)), present


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(TransformerBlock(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, past=None):
        start_pos = 0 if past is None else past[0][0].size(2)
        h, presents = self.tok_embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            h, present = layer(h, start_pos, None if past is None else past[i])
            presents.append(present)
        return self.output(self.norm(h)), presents


def chunked(model, chunks):
    """Prefill in chunks of any size, then decode."""
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="llama, chunked prefill",
    build=Llama,
    forward=lambda model, tokens: model(tokens)[0],
    cache=chunked,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
        "tied": False,
    },
)
