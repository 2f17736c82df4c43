"""Multi-head latent attention (DeepSeek-V2): a low-rank latent and one rotary key are cached; decoding absorbs W_uk, W_uv."""
import torch
from torch import Tensor, nn

from veriformer.properties import Subject


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [..., T, R], pairs (i, i + R/2)."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LatentAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        head = dim // heads
        if head < 4:
            raise ValueError("a head needs channels with and without positions")
        self.heads, self.head = heads, head
        self.rope = 2 * (head // 4)
        self.nope = head - self.rope
        self.rank = 3 * dim // 4
        self.wq = nn.Linear(dim, heads * head, bias=False)
        self.wkv_a = nn.Linear(dim, self.rank + self.rope, bias=False)
        self.kv_norm = RMSNorm(self.rank)
        self.w_uk = nn.Parameter(torch.randn(heads, self.nope, self.rank) / self.rank**0.5)
        self.w_uv = nn.Parameter(torch.randn(heads, head, self.rank) / self.rank**0.5)
        self.wo = nn.Linear(heads * head, dim, bias=False)
        self.softmax_scale = head**-0.5

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None, absorb: bool):
        start = 0 if past is None else past[0].shape[1]
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        q = self.wq(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        q_rope = rotate(q_rope, positions)
        latent, k_rope = self.wkv_a(x).split([self.rank, self.rope], dim=-1)
        latent, k_rope = self.kv_norm(latent), rotate(k_rope, positions)
        if past is not None:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope], 1)
        hidden = torch.ones(x.shape[1], latent.shape[1], dtype=torch.bool, device=x.device).triu(start + 1)
        if absorb:  # as multi-query attention over the latent
            q_full = torch.cat([torch.einsum("bhtn,hnr->bhtr", q_nope, self.w_uk), q_rope], dim=-1)
            k_full = torch.cat([latent, k_rope], dim=-1)
            scores = torch.einsum("bhtc,bsc->bhts", q_full, k_full) * self.head**-0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            y = torch.einsum("bhtr,hvr->bhtv", torch.einsum("bhts,bsr->bhtr", weights, latent), self.w_uv)
        else:
            k_nope = torch.einsum("bsr,hnr->bhsn", latent, self.w_uk)
            v = torch.einsum("bsr,hvr->bhsv", latent, self.w_uv)
            scores = q_nope @ k_nope.mT + q_rope @ k_rope[:, None].mT
            weights = (scores * self.softmax_scale).masked_fill(hidden, -torch.inf).softmax(-1)
            y = weights @ v
        return self.wo(y.transpose(1, 2).flatten(2)), (latent, k_rope)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int):
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attn = LatentAttention(dim, heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, past, absorb):
        y, past = self.attn(self.attn_norm(x), past, absorb)
        x = x + y
        h = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h)), past


class LatentDecoder(nn.Module):
    def __init__(self, vocab: int, dim: int, heads: int, layers: int, hidden: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, pasts: list | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x, kept = block(x, None if pasts is None else pasts[i], absorb=pasts is not None)
            if pasts is not None:
                pasts[i] = kept
        return self.head(self.norm(x))


def cached(model, chunks):
    pasts = [None] * len(model.blocks)
    return torch.cat([model(chunk, pasts) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="latent attention decoder",
    build=lambda c: LatentDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={
        "causal": True, "positions": "rotary", "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "swiglu", "bias": False, "structure": "other",
    },
)
