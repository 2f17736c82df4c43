"""An encoder that runs its batch in checkpointed micro-batches, each cut to its longest real part."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import DrawnConfig, Subject


class RMS(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = RMS(d), RMS(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate_up, self.down = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, real):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, self.h, 3, d // self.h).permute(3, 0, 2, 1, 4)
        hide = torch.zeros(b, 1, 1, t, dtype=x.dtype, device=x.device)
        hide = hide.masked_fill(~real[:, None, None], torch.finfo(x.dtype).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=hide.expand(b, 1, t, t))
        x = x + self.o(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Encoder(nn.Module):
    def __init__(self, c, micro=2):
        super().__init__()
        self.micro, self.d = micro, c.d_model
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm = RMS(c.d_model)

    def sinusoid(self, places, dtype):
        half = (self.d + 1) // 2
        rate = 10000.0 ** (-2 * torch.arange(half, device=places.device, dtype=torch.float64) / self.d)
        angle = places[..., None].double() * rate
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)[..., : self.d].to(dtype)

    def some(self, tokens, real):
        """Pack the real tokens to the front, compute, and put them back."""
        longest = max(int(real.sum(1).max()), 1)
        order = torch.argsort(real.logical_not().to(torch.uint8), dim=1, stable=True)[:, :longest]
        packed, kept = tokens.gather(1, order), real.gather(1, order)
        x = self.emb(packed)
        x = x + self.sinusoid(torch.arange(longest, device=tokens.device), x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, kept, use_reentrant=False)
        x = self.norm(x) * kept[..., None]
        out = x.new_zeros(*tokens.shape, x.shape[-1])
        return out.scatter(1, order[..., None].expand_as(x), x)

    def forward(self, tokens, mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        pairs = zip(tokens.split(self.micro), real.split(self.micro))
        return torch.cat([self.some(a, b) for a, b in pairs])


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


declared = Subject(
    kind="encoder", name="micro-batched encoder", build=Encoder, forward=forward,
    declares={
        "causal": False, "positions": "sinusoidal", "layout": "interleaved", "norm": "rms", "norm_placement": "pre",
        "final_norm": True, "residual": True, "activation": "swiglu", "bias": False, "padding_side": "both",
        "beyond_max_len": "works", "attention_scale": "1/sqrt(d_head)", "embedding_scale": False,
    },
)
undeclared = Subject(kind="encoder", build=Encoder, forward=forward)
