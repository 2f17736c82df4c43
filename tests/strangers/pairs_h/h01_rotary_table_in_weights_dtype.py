"""A LLaMA-like decoder (RMSNorm, rotary positions, grouped queries, SwiGLU) in the style of the Hugging Face modelling
files: config dataclass, `rotate_half`, `apply_rotary_pos_emb`."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The angles of the rotary embedding (positions, inverse frequencies and their product) are formed in the dtype of "
    "the hidden states instead of float32. In float32 nothing is seen; in bfloat16 8 bits hold neither position 257 nor "
    "the angle of position 60 to better than a quarter of a radian, so that distant tokens are rotated at random."
)
PLACE = "WrongRotary.angles: `torch.arange(length, dtype=x.dtype)` and the outer product in x.dtype"


@dataclass
class MiniLlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, dim, theta):
        super().__init__()
        self.dim, self.theta = dim, theta

    def inv_freq(self, device):
        return self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim)

    def angles(self, x, length):
        return torch.outer(torch.arange(length, dtype=torch.float64, device=x.device), self.inv_freq(x.device))

    def forward(self, x, length):
        angles = self.angles(x, length)
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class WrongRotary(Rotary):
    def angles(self, x, length):
        position = torch.arange(length, dtype=x.dtype, device=x.device)
        return torch.outer(position, self.inv_freq(x.device).to(x.dtype))


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.hidden_size // self.heads
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.groups, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.groups, self.dim).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(x.dtype, torch.float32)) * self.dim**-0.5
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        inner = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(inner)) * self.up_proj(inner))


class MiniLlama(nn.Module):
    def __init__(self, config, rotary=Rotary):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary = rotary(config.hidden_size // config.num_attention_heads, config.rope_theta)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary(x, tokens.shape[1])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def make(rotary):
    def build(c):
        return MiniLlama(
            MiniLlamaConfig(c.vocab_size, c.d_model, c.d_ff, c.num_layers, c.num_heads, c.num_key_value_heads), rotary
        )

    return Subject(
        kind="decoder",
        name="mini llama",
        build=build,
        forward=lambda model, tokens: model(tokens),
        domain={"d_model": [16, 32, 64], "num_heads": [2, 4, 8]},  # heads of an even width
        declares={
            "causal": True, "positions": "rotary", "norm": "rms", "norm_placement": "pre", "final_norm": True,
            "activation": "swiglu", "bias": False, "grouped_queries": True, "half_precision": True,
        },
    )  # fmt: skip


right, wrong = make(Rotary), make(WrongRotary)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=32, num_heads=4, num_key_value_heads=2, num_layers=1, d_ff=48, vocab_size=50)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for p in good.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
        nn.init.normal_(good.embed_tokens.weight)
        for name in ("q_proj", "k_proj"):
            getattr(good.layers[0].self_attn, name).weight.mul_(2)
    bad.load_state_dict(good.state_dict())
    tokens = torch.randint(0, 50, (2, 600))

    def relative(a, b):
        return ((a.double() - b).norm(dim=-1) / b.norm(dim=-1).mean()).mean(0)

    with torch.no_grad():
        # rotary by complex numbers, in float64
        x = torch.randn(2, 4, 600, 8, dtype=torch.float64)
        cos, sin = good.rotary(x, 600)
        z = torch.complex(*x.chunk(2, -1)) * torch.polar(
            torch.ones((), dtype=torch.float64),
            torch.arange(600)[:, None].double() * 10000.0 ** (-torch.arange(4).double() / 4),
        )
        assert torch.allclose(x * cos + rotate_half(x) * sin, torch.cat((z.real, z.imag), -1), atol=1e-11)
        truth = good.double()(tokens)
        assert (bad.double()(tokens) - truth).abs().max() < 1e-9
        for model in (good, bad):
            model.float()
            assert (model(tokens).double() - truth).abs().max() < 3e-2 * truth.abs().max()
        f32 = [relative(m(tokens), truth).max().item() for m in (good, bad)]
        later = tokens.clone()
        later[:, 300:] = 1
        assert torch.allclose(good(tokens)[:, :300], good(later)[:, :300], atol=1e-4)
        half = [relative(m.bfloat16()(tokens), truth) for m in (good, bad)]
    for name, e in zip(("right", "wrong"), half):
        print(name, "bfloat16: relative error first 20", round(e[:20].mean().item(), 4), "from 300 on", round(e[300:].mean().item(), 4))
    print("float32", f32)
    assert max(f32) < 1e-3
    assert half[0].mean() < 0.04 and half[1][:20].mean() < 0.06 and half[1][300:].mean() > 4 * half[0][300:].mean()
