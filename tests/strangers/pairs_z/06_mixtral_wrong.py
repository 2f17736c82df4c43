WHAT = "the router's softmax runs over dim=1, which was the experts when tokens were flattened to [N, E] and is time now that they are [B, T, E]: experts are weighed and ranked by probabilities over positions, future ones included (line 41)."
"""Mixtral: a sparse mixture of SwiGLU experts, two of each token, weights renormalised."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

NUM_EXPERTS, TOP_K = 4, 2


class MixtralRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class MixtralExpert(nn.Module):
    def __init__(self, hidden_size, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(hidden_size, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self, hidden_size, ffn_dim):
        super().__init__()
        self.gate = nn.Linear(hidden_size, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([MixtralExpert(hidden_size, ffn_dim) for _ in range(NUM_EXPERTS)])

    def route(self, x):
        """[B, T, D] -> weights [B, T, TOP_K] and experts [B, T, TOP_K]."""
        probabilities = F.softmax(self.gate(x), dim=1)
        weights, selected = torch.topk(probabilities, TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, selected

    def forward(self, x):
        weights, selected = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            batch, position, slot = torch.where(selected == index)
            if batch.numel() == 0:
                continue
            given = expert(x[batch, position]) * weights[batch, position, slot, None]
            out = out.index_put((batch, position), given, accumulate=True)
        return out


def rotary(x):
    """Llama's rotation of [B, H, T, K]: channel i goes with channel i + K/2."""
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype, device=x.device), inv)
    sin, cos = angle.sin(), angle.cos()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MixtralLayer(nn.Module):
    def __init__(self, hidden_size, heads, kv_heads, ffn_dim):
        super().__init__()
        self.heads, self.kv_heads, self.k = heads, kv_heads, hidden_size // heads
        if self.k % 2:
            raise ValueError("odd head width")
        self.q_proj = nn.Linear(hidden_size, heads * self.k, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_heads * self.k, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_heads * self.k, bias=False)
        self.o_proj = nn.Linear(heads * self.k, hidden_size, bias=False)
        self.block_sparse_moe = SparseMoe(hidden_size, ffn_dim)
        self.input_layernorm = MixtralRMSNorm(hidden_size)
        self.post_attention_layernorm = MixtralRMSNorm(hidden_size)

    def attend(self, x):
        q = rotary(self.q_proj(x).unflatten(-1, (self.heads, self.k)).transpose(1, 2))
        k = rotary(self.k_proj(x).unflatten(-1, (self.kv_heads, self.k)).transpose(1, 2))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.k)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.input_layernorm(x))
        return x + self.block_sparse_moe(self.post_attention_layernorm(x))


class Mixtral(nn.Module):
    def __init__(self, vocab, hidden_size, heads, kv_heads, layers, ffn_dim):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden_size)
        self.layers = nn.ModuleList(
            [MixtralLayer(hidden_size, heads, kv_heads, ffn_dim) for _ in range(layers)]
        )
        self.norm = MixtralRMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def router(model, x):
    weights, selected = model.layers[0].block_sparse_moe.route(x)
    return weights.new_zeros(*x.shape[:2], NUM_EXPERTS).scatter(-1, selected, weights)


subject = Subject(
    kind="decoder",
    name="Mixtral",
    build=lambda c: Mixtral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    router=router,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "bias": False,
        "grouped_queries": True,
        "norm_topk_prob": True,
        "structure": "other",
    },
)
