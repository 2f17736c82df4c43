"""Llama with grouped queries, in the style of Meta's first release (wq, wk, wv, wo; w1, w2, w3), with a list of keys and
values as its cache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "RMSNorm divides by the root of the variance about the mean instead of the root of the mean square, and does not "
    "subtract the mean: the norm is neither RMS nor LayerNorm, and the length of what it returns depends on how far the "
    "mean of the channels is from zero. With centred activations nothing is seen."
)
PLACE = "WrongRMSNorm.power"


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def power(self, x):
        return x.pow(2).mean(-1, keepdim=True)

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(self.power(wide) + self.eps)).type_as(x) * self.weight


class WrongRMSNorm(RMSNorm):
    def power(self, x):
        return x.var(-1, keepdim=True, unbiased=False)


def rotate(x, start):
    """Rotate halves of x `[B, T, H, K]` by its positions from `start` on."""
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(start, start + x.shape[1], dtype=torch.float64, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.size, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(heads * self.size, dim, bias=False)

    def forward(self, x, seen, past):
        b, t, _ = x.shape
        start = 0 if past is None else past[0].shape[1]
        q = rotate(self.wq(x).view(b, t, self.heads, self.size), start)
        k = rotate(self.wk(x).view(b, t, self.kv_heads, self.size), start)
        v = self.wv(x).view(b, t, self.kv_heads, self.size)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        present = (k, v)
        q = q.view(b, t, self.kv_heads, -1, self.size)
        scores = torch.einsum("btgrk,bsgk->bgrts", q, k) * self.size**-0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        out = torch.einsum("bgrts,bsgk->btgrk", weights, v)
        return self.wo(out.reshape(b, t, -1)), present


class Block(nn.Module):
    def __init__(self, c, norm):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.w1, self.w3 = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in "13")
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.attention_norm, self.ffn_norm = norm(c.d_model), norm(c.d_model)

    def forward(self, x, seen, past):
        y, present = self.attention(self.attention_norm(x), seen, past)
        x = x + y
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), present


class Llama(nn.Module):
    def __init__(self, c, norm):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c, norm) for _ in range(c.num_layers))
        self.norm = norm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None):
        start = 0 if past is None else past[0][0].shape[1]
        at = torch.arange(start + tokens.shape[1], device=tokens.device)
        seen = (at <= at[start:, None])[None, None, None]
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, None, None, : len(at)].bool()
        x, presents = self.tok_embeddings(tokens), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, seen, None if past is None else past[i])
            presents.append(present)
        return self.output(self.norm(x)), presents


def cached(model, chunks, attention_mask=None):
    past, outputs = None, []
    for chunk in chunks:
        y, past = model(chunk, attention_mask, past)
        outputs.append(y)
    return torch.cat(outputs, 1)


def make(norm):
    return Subject(
        kind="decoder",
        name="llama",
        build=lambda c: Llama(c, norm),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
        cache=cached,
        domain={"d_model": [8, 16], "num_heads": [4], "num_key_value_heads": [1, 2]},
        declares={
            "positions": "rotary", "layout": "halves", "base": 10000, "norm": "rms", "norm_bias": False,
            "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "swiglu", "bias": False,
            "output_bias": False, "tied": False, "grouped_queries": True, "attention_scale": "1/sqrt(d_head)",
            "padding_side": "both", "embedding_scale": False,
        },
    )  # fmt: skip


right, wrong = make(RMSNorm), make(WrongRMSNorm)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for width in (8, 16):
            x = torch.randn(4, 5, width, dtype=dtype) + 0.7
            good, bad = RMSNorm(width).to(dtype), WrongRMSNorm(width).to(dtype)
            truth = F.rms_norm(x.double(), (width,), eps=1e-6)
            gaps = [(m(x) - truth).abs().max().item() for m in (good, bad)]
            print(dtype, "norm alone: right %.1e wrong %.2f" % tuple(gaps))
            assert gaps[0] < small and gaps[1] > 0.1
            x = x - x.mean(-1, keepdim=True)
            assert (good(x) - bad(x)).abs().max() < small  # centred: the same
        c = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=3)
        good, bad = right.build(c).to(dtype), wrong.build(c).to(dtype)
        with torch.no_grad():
            for p in good.parameters():
                p.normal_(1.0 if p.dim() == 1 else 0, 0.4)
        bad.load_state_dict(good.state_dict())
        tokens = torch.randint(0, 11, (2, 9))
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, :3] = False

        def plain(model, tokens):
            """Every head with keys of its own, torch's attention and norm, complex rotation."""
            w = {k: v.double() for k, v in model.state_dict().items()}
            t = tokens.shape[1]
            turn = torch.polar(
                torch.ones(t, 2, dtype=torch.float64), torch.arange(t)[:, None] * torch.tensor([1, 0.01], dtype=torch.float64)
            )

            def heads(y, n, rot):
                y = y.view(*y.shape[:2], n, 4).transpose(1, 2)
                if rot:
                    z = torch.complex(y[..., :2].contiguous(), y[..., 2:].contiguous()) * turn
                    y = torch.cat((z.real, z.imag), -1)
                return y.repeat_interleave(4 // n, 1)

            x = w["tok_embeddings.weight"][tokens]
            for i in range(3):
                p = f"layers.{i}."
                h = F.rms_norm(x, (16,), w[p + "attention_norm.weight"], 1e-6)
                q, k, v = (h @ w[p + f"attention.w{n}.weight"].T for n in "qkv")
                y = F.scaled_dot_product_attention(heads(q, 4, True), heads(k, 2, True), heads(v, 2, False), is_causal=True)
                x = x + y.transpose(1, 2).flatten(2) @ w[p + "attention.wo.weight"].T
                h = F.rms_norm(x, (16,), w[p + "ffn_norm.weight"], 1e-6)
                x = x + (F.silu(h @ w[p + "w1.weight"].T) * (h @ w[p + "w3.weight"].T)) @ w[p + "w2.weight"].T
            return F.rms_norm(x, (16,), w["norm.weight"], 1e-6) @ w["output.weight"].T

        truth = plain(good, tokens)
        a, b = (m(tokens)[0] for m in (good, bad))
        far = (a - truth).abs().max().item(), (b - truth).abs().max().item()
        print(dtype, "model: right %.1e wrong %.2f" % far, "spread", a.std().item(), b.std().item())
        assert (a - truth).abs().max() < small * 10 and (b - truth).abs().max() > 0.02
        for m in (good, bad):
            whole = m(tokens, mask)[0]
            assert (whole[1, 3:] - m(tokens[1:, 3:])[0]).abs().max() < small * 10  # left padding
            assert (cached(m, tokens.split((4, 1, 1, 3), 1), mask) - whole)[mask].abs().max() < small * 10
