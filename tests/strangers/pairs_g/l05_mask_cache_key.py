"""Local/global decoder: five of six blocks attend to the last 16 tokens, each fourth block to everything (Gemma-2/3 style).

Masks are the same for every call of one length, so they are memoised.
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The memoised attention masks are keyed by the length alone, not by the window; the first block is a local one, so the "
    "global block (the fourth) is given the local mask and nothing farther back than the stacked windows reaches an output."
)
PLACE = "LengthKeyed.key"

LOCAL = 16
EVERY = 4


class Masks:
    def __init__(self) -> None:
        self.made: dict[object, torch.Tensor] = {}

    def key(self, length: int, window: int | None) -> object:
        return length, window

    def __call__(self, length: int, window: int | None, device: torch.device) -> torch.Tensor:
        key = self.key(length, window)
        if key not in self.made:
            if len(self.made) > 32:
                self.made.clear()
            visible = torch.ones(length, length, dtype=torch.bool).tril()
            if window is not None:
                visible = visible.triu(1 - window)
            self.made[key] = visible
        return self.made[key].to(device)


class LengthKeyed(Masks):
    def key(self, length, window):
        return length


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, visible):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.q_proj, self.k_proj, self.v_proj))
        empty = ~visible.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | empty).masked_fill(empty, 0.0)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, c: DrawnConfig, index: int) -> None:
        super().__init__()
        self.attn = Attention(c.d_model, c.num_heads, None if (index + 1) % EVERY == 0 else LOCAL)
        self.norm_1, self.norm_2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.fc, self.proj = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, visible):
        x = x + self.attn(self.norm_1(x), visible)
        return x + self.proj(F.gelu(self.fc(self.norm_2(x))))


class LocalGlobal(nn.Module):
    masks_class = Masks

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.max_len = c.max_len
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.place = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.unembed = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.masks = self.masks_class()

    def from_embeddings(self, x, attention_mask=None):
        t = x.shape[1]
        if t > self.max_len:
            raise ValueError(f"length {t} > {self.max_len}")
        x = x + self.place.weight[:t]
        for block in self.blocks:
            visible = self.masks(t, block.attn.window, x.device)[None, None]
            if attention_mask is not None:
                visible = visible & attention_mask.bool()[:, None, None]
            x = block(x, visible)
        return self.unembed(self.norm(x))

    def forward(self, tokens, attention_mask=None):
        return self.from_embeddings(self.embed(tokens), attention_mask)


class LocalGlobalByLength(LocalGlobal):
    masks_class = LengthKeyed


SIZES = DrawnConfig(d_model=64, num_heads=4, num_key_value_heads=4, num_layers=6, d_ff=128, vocab_size=50, max_len=256)


def make(cls, c=SIZES):
    model = cls(c)
    gen = torch.Generator().manual_seed(11)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.normal_(0, p.shape[1] ** -0.5, generator=gen)
    model.embed.weight.data.mul_(8)
    return model.eval()


def subject(cls, name):
    return Subject(
        kind="decoder",
        module=make(cls),
        config=SIZES,
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.from_embeddings(x, attention_mask),
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "learned",
            "max_len": 256,
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "rms",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "gelu",
            "bias": False,
            "output_bias": False,
            "tied": False,
            "embedding_scale": False,
            "padding_side": "right",
        },
    )


right = subject(LocalGlobal, "local-global")
wrong = subject(LocalGlobalByLength, "local-global-by-length")


def reference(m, tokens, mask=None):
    p = {k: v.double() for k, v in m.state_dict().items()}
    T, D = tokens.shape[1], 64
    rms = lambda h, g: h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * g
    gap = torch.arange(T)[:, None] - torch.arange(T)
    x = p["embed.weight"][tokens] + p["place.weight"][:T]
    for i in range(len(m.blocks)):
        w = lambda n: p[f"blocks.{i}.{n}.weight"]
        see = ((gap >= 0) & ((gap < 16) | (i % 4 == 3))).expand(len(tokens), T, T)
        see = see if mask is None else see & mask[:, None]
        h, o = rms(x, w("norm_1")), []
        for a in range(0, D, 16):
            q, k, v = (h @ w(f"attn.{n}_proj")[a : a + 16].T for n in "qkv")
            o.append((q @ k.mT / 4).masked_fill(~see, -torch.inf).softmax(-1).nan_to_num(0.0) @ v)
        x = x + torch.cat(o, -1) @ w("attn.o_proj").T
        x = x + F.gelu(rms(x, w("norm_2")) @ w("fc").T) @ w("proj").T
    return rms(x, p["norm.weight"]) @ p["unembed.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = right.module, wrong.module
    with torch.no_grad():
        for T, same in [(3, True), (16, True), (40, False), (150, False)]:
            tokens = torch.randint(50, (2, T))
            mask = torch.rand(2, T) > 0.3
            for keep in (None, mask):
                want = reference(good, tokens, keep)
                assert (good(tokens, keep) - want).abs().max() < 1e-4
                off = (bad(tokens, keep) - want).abs().max()
                assert (off < 1e-4) == same and (same or off > 1e-2), (T, off)
        assert (make(LocalGlobal).double()(tokens, mask) - want).abs().max() < 1e-10
        other = tokens.clone()
        other[:, 0] = (other[:, 0] + 1) % 50
        assert (good(tokens) - good(other))[:, -1].abs().max() > 1e-3
        assert (bad(tokens) - bad(other))[:, -1].abs().max() < 1e-6
    from dataclasses import replace
    two = replace(SIZES, num_layers=3)
    tokens = torch.randint(50, (2, 100))
    assert torch.equal(make(LocalGlobal, two)(tokens), make(LocalGlobalByLength, two)(tokens))
    print("ok", __file__)
