"""vLLM-like Llama: a norm that first adds what is pending to the residual stream, so that both are one kernel."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    """norm(x), or with a residual stream: (norm(x + residual), x + residual)."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x, residual=None):
        if residual is not None:
            x = x + residual
            residual = x
        out = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.variance_epsilon) * self.weight
        return out if residual is None else (out, residual)


class RotaryEmbedding(nn.Module):
    def __init__(self, head_size, base=10000.0):
        super().__init__()
        if head_size % 2:
            raise ValueError("an even width of the heads is needed")
        self.head_size, self.base = head_size, base

    def forward(self, x):  # [B, H, T, K], NeoX layout
        steps = torch.arange(0, self.head_size, 2, dtype=torch.float64, device=x.device) / self.head_size
        angle = torch.outer(torch.arange(x.shape[2], dtype=torch.float64, device=x.device), self.base**-steps)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, intermediate):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.rotary_emb = RotaryEmbedding(self.head_dim)
        self.gate_up_proj = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)

    def self_attn(self, x):
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (z.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for z in self.qkv_proj(x).split(sizes, dim=-1))
        q, k = self.rotary_emb(q), self.rotary_emb(k)
        k, v = (z.repeat_interleave(self.heads // self.kv_heads, dim=1) for z in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def mlp(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)

    def forward(self, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            [LlamaDecoderLayer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.norm = RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids):
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return self.lm_head(hidden_states)


subject = Subject(
    kind="decoder",
    name="Llama, fused add and norm",
    build=Llama,
    forward=lambda m, tokens: m(tokens),
    declares={"positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "swiglu", "bias": False, "grouped_queries": True},
)
