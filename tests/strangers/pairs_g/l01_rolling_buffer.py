"""A streaming Mistral-like block: grouped queries, a window of 32, keys and values in a rolling buffer of `window` slots."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "When a chunk of several tokens is fed after the rolling buffer has filled, its keys are written into the buffer before "
    "attention reads it, so they evict keys that the chunk's earlier queries still have in their window (single-token steps "
    "and the first prompt are right)."
)
PLACE = "EagerRolling.extend"

WINDOW = 32


class Rolling:
    """Slot `position % window` holds a key; `at` is the position that stands in each slot, -1 for none."""

    def __init__(self, like: Tensor, batch: int, groups: int, width: int, window: int) -> None:
        self.window = window
        self.k = like.new_zeros(batch, groups, window, width)
        self.v = like.new_zeros(batch, groups, window, width)
        self.at = torch.full((window,), -1, dtype=torch.long, device=like.device)

    @property
    def empty(self) -> bool:
        return bool((self.at < 0).all())

    def write(self, k: Tensor, v: Tensor, at: Tensor) -> None:
        k, v, at = k[:, :, -self.window :], v[:, :, -self.window :], at[-self.window :]
        slots = at % self.window
        self.k = self.k.index_copy(2, slots, k)
        self.v = self.v.index_copy(2, slots, v)
        self.at = self.at.index_copy(0, slots, at)

    def extend(self, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take in new keys; give the keys, values and positions to attend to."""
        if self.empty:  # the prompt attends to itself
            self.write(k, v, at)
            return k, v, at
        seen = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.at, at])
        self.write(k, v, at)
        return seen


class EagerRolling(Rolling):
    def extend(self, k: Tensor, v: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.empty:
            self.write(k, v, at)
            return k, v, at
        self.write(k, v, at)
        return self.k, self.v, self.at


class Block(nn.Module):
    buffer_class = Rolling

    def __init__(self, d: int, heads: int, groups: int, hidden: int, max_len: int) -> None:
        super().__init__()
        self.heads, self.groups, self.width, self.max_len = heads, groups, d // heads, max_len
        self.attention_norm = nn.RMSNorm(d, eps=1e-6)
        self.ffn_norm = nn.RMSNorm(d, eps=1e-6)
        self.wq = nn.Linear(d, heads * self.width, bias=False)
        self.wk = nn.Linear(d, groups * self.width, bias=False)
        self.wv = nn.Linear(d, groups * self.width, bias=False)
        self.wo = nn.Linear(heads * self.width, d, bias=False)
        self.w1 = nn.Linear(d, hidden, bias=False)
        self.w2 = nn.Linear(hidden, d, bias=False)
        self.w3 = nn.Linear(d, hidden, bias=False)

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        half = self.width // 2
        freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
        angle = at[:, None].double() * freq
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def step(self, x: Tensor, start: int, mask: Tensor | None, buffer: Rolling | None) -> Tensor:
        b, n, _ = x.shape
        if start + n > self.max_len:
            raise ValueError(f"at most {self.max_len} positions")
        at = torch.arange(start, start + n, device=x.device)
        h = self.attention_norm(x)
        q = self.rotate(self.wq(h).view(b, n, self.heads, self.width).transpose(1, 2), at)
        k = self.rotate(self.wk(h).view(b, n, self.groups, self.width).transpose(1, 2), at)
        v = self.wv(h).view(b, n, self.groups, self.width).transpose(1, 2)
        at_k = at
        if buffer is not None:
            k, v, at_k = buffer.extend(k, v, at)
        k = k.repeat_interleave(self.heads // self.groups, 1)
        v = v.repeat_interleave(self.heads // self.groups, 1)
        back = at[:, None] - at_k
        allowed = ((back >= 0) & (back < WINDOW) & (at_k >= 0)).expand(b, 1, n, -1)
        if mask is not None:
            allowed = allowed & mask.bool()[:, at_k.clamp(min=0)][:, None, None, :]
        scores = q @ k.transpose(-1, -2) * self.width**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        x = x + self.wo((weights @ v).transpose(1, 2).reshape(b, n, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.step(x, 0, attention_mask, None)

    def stream(self, chunks, attention_mask: Tensor | None = None) -> Tensor:
        first = chunks[0]
        buffer = self.buffer_class(first, first.shape[0], self.groups, self.width, WINDOW)
        start, out = 0, []
        for chunk in chunks:
            out.append(self.step(chunk, start, attention_mask, buffer))
            start += chunk.shape[1]
        return torch.cat(out, 1)


class EagerBlock(Block):
    buffer_class = EagerRolling


SIZES = DrawnConfig(d_model=64, num_heads=4, num_key_value_heads=2, num_layers=1, d_ff=128, max_len=256)


def ready(cls: type[Block]) -> Block:
    block = cls(SIZES.d_model, SIZES.num_heads, SIZES.num_key_value_heads, SIZES.d_ff, SIZES.max_len)
    source = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in block.parameters():
            if p.dim() > 1:
                p.normal_(0.0, p.shape[1] ** -0.5, generator=source)
    return block.eval()


FACTS = {
    "causal": True,
    "window": WINDOW,
    "positions": "rotary",
    "layout": "halves",
    "base": 10000,
    "attention_scale": "1/sqrt(d_head)",
    "grouped_queries": True,
    "norm": "rms",
    "norm_placement": "pre",
    "residual": True,
    "activation": "swiglu",
    "bias": False,
    "padding_side": "both",
    "max_len": 256,
    "beyond_max_len": "error",
    "cross_attention": False,
}


def subject(cls: type[Block], name: str) -> Subject:
    return Subject(
        kind="layer",
        module=ready(cls),
        name=name,
        config=SIZES,
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        cache=lambda m, chunks, attention_mask=None: m.stream(chunks, attention_mask),
        declares=FACTS,
        mask_forms=("padding",),
    )


right = subject(Block, "rolling")
wrong = subject(EagerBlock, "rolling-eager")


def reference(m: Block, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """One query at a time, in float64."""
    p = {n: t.double() for n, t in m.named_parameters()}
    x, K, out = x.double(), m.width, []
    rms = lambda h, g: h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * g
    h = rms(x, p["attention_norm.weight"])
    for b in range(x.shape[0]):
        rows = []
        for t in range(x.shape[1]):
            mixed = []
            for head in range(m.heads):
                g = head // (m.heads // m.groups)
                def turned(w, i, r):
                    u = torch.complex(*(h[b, r] @ w[i * K : (i + 1) * K].T).chunk(2))
                    w_ = 10000.0 ** (-torch.arange(K // 2, dtype=torch.float64) / (K // 2))
                    u = u * torch.polar(torch.ones_like(w_), r * w_)
                    return torch.cat([u.real, u.imag])
                q = turned(p["wq.weight"], head, t)
                keys = [s for s in range(max(0, t - WINDOW + 1), t + 1) if mask is None or mask[b, s]]
                if not keys:
                    mixed.append(torch.zeros(K, dtype=torch.float64))
                    continue
                s = torch.stack([q @ turned(p["wk.weight"], g, r) for r in keys]) * K**-0.5
                v = torch.stack([h[b, r] @ p["wv.weight"][g * K : (g + 1) * K].T for r in keys])
                mixed.append(s.softmax(0) @ v)
            rows.append(torch.cat(mixed))
        out.append(torch.stack(rows))
    x = x + torch.stack(out) @ p["wo.weight"].T
    h = rms(x, p["ffn_norm.weight"])
    return x + (F.silu(h @ p["w1.weight"].T) * (h @ p["w3.weight"].T)) @ p["w2.weight"].T


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = right.module, wrong.module
    with torch.no_grad():
        for T in (5, 45):
            x = torch.randn(2, T, 64)
            mask = torch.ones(2, T, dtype=torch.bool)
            mask[1, : T // 3] = False
            want = reference(good, x, mask)
            assert (good(x, mask) - want).abs().max() < 1e-4
            assert (good.double()(x.double(), mask) - want).abs().max() < 1e-10
            good.float()
        for sizes, same in [((4, 4, 1), True), ((20, 12), True), ((40,) + (1,) * 10, True), ((30, 10, 10), False), ((64, 7), False), ((1,) * 40 + (3,), False)]:
            x = torch.randn(2, sum(sizes), 64)
            full = good(x)
            assert (right.cache(good, x.split(sizes, 1)) - full).abs().max() < 1e-4
            off = (wrong.cache(bad, x.split(sizes, 1)) - full).abs().max()
            assert (off < 1e-4) == same and (same or off > 1e-2), (sizes, off)
            assert (bad(x) - full).abs().max() < 1e-5
    print("ok", __file__)
