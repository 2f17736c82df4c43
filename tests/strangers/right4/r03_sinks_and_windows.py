"""gpt-oss in small: a learned sink per head joins the softmax and is dropped after it, even layers see the last 6 keys and
odd ones all, grouped queries, biases in attention, a clipped SwiGLU with (up + 1). The cache of a local layer keeps its
last keys alone.

Why it is right: a sink is one more logit in the denominator, so rows sum to less than one; windows are by design. Below:
against loops in float64, causal, padding on both sides, and a cache that forgets equals no cache."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WINDOW, LIMIT, ALPHA = 6, 7.0, 1.702


def rotate(x, at):
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = at.double()[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, c, window):
        super().__init__()
        self.h, self.g, self.k, self.window = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads, window
        self.qkv, self.out = nn.Linear(c.d_model, (self.h + 2 * self.g) * self.k), nn.Linear(c.d_model, c.d_model)
        self.sinks = nn.Parameter(torch.randn(c.num_heads))
        self.norm_1, self.norm_2 = nn.RMSNorm(c.d_model, eps=1e-5), nn.RMSNorm(c.d_model, eps=1e-5)
        self.mlp_1, self.mlp_2 = nn.Linear(c.d_model, 2 * c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, start, mask, past):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, -1, self.k).transpose(1, 2).split((self.h, self.g, self.g), 1)
        at = torch.arange(start, start + t, device=x.device)
        q, k = rotate(q, at), rotate(k, at)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        keys = torch.arange(start + t - k.shape[2], start + t, device=x.device)
        seen = keys <= at[:, None]
        if self.window:
            seen = seen & (keys > at[:, None] - self.window)
        seen = seen[None, None]
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, keys]
        keep = slice(-(self.window - 1), None) if self.window else slice(None)
        present = (k[:, :, keep], v[:, :, keep])
        k, v = (y.repeat_interleave(self.h // self.g, 1) for y in (k, v))
        scores = (q @ k.mT * self.k**-0.5).masked_fill(~seen, torch.finfo(q.dtype).min)
        sinks = self.sinks.to(scores.dtype)[None, :, None, None].expand(b, -1, t, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] * seen
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        gate, up = self.mlp_1(self.norm_2(x)).chunk(2, -1)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return x + self.mlp_2(gate * torch.sigmoid(ALPHA * gate) * (up + 1)), present


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, WINDOW if i % 2 == 0 else None) for i in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.unembedding = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None, start=0, past=None):
        x, kept = self.embedding(tokens), []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, start, mask, None if past is None else past[i])
            kept.append(present)
        return self.unembedding(self.norm(x)), kept


def cached(model, chunks, attention_mask=None, reorder=None):
    past, start, outputs = None, 0, []
    for i, chunk in enumerate(chunks):
        y, past = model(chunk, attention_mask, start, past)
        start += chunk.shape[1]
        outputs.append(y)
        if i == 0 and reorder is not None:
            past = [tuple(z.index_select(0, reorder) for z in layer) for layer in past]
            attention_mask = None if attention_mask is None else attention_mask.index_select(0, reorder)
    return torch.cat(outputs, 1)


def make(**declares):
    return Subject(
        kind="decoder", name="sinks and windows", build=Model, cache=cached, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
        domain={"d_model": [8, 16], "num_heads": [4], "num_key_value_heads": [1, 2], "num_layers": [2, 3]},
    )  # fmt: skip


declared = make(
    causal=True, sink=True, sparse=True, grouped_queries=True, positions="rotary", layout="halves", base=10000,
    attention_scale="1/sqrt(d_head)", norm="rms", norm_placement="pre", final_norm=True, activation="other",
    output_bias=False, tied=False, padding_side="both", structure="other", residual=True,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=3)
    model = Model(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name), 0.45)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 14))
    mask = torch.ones(2, 14, dtype=torch.bool)
    mask[0, 11:], mask[1, :3] = False, False

    def slow(row):
        def norm(x, n):
            return x / (x.square().mean() + 1e-5).sqrt() * w[n + ".weight"]

        def lin(x, n):
            return w[n + ".weight"] @ x + w[n + ".bias"]

        def turn(z, t):
            z = torch.complex(z[:2].contiguous(), z[2:].contiguous())
            z = z * torch.exp(1j * t * torch.tensor([1, 0.01], dtype=torch.float64))
            return torch.cat((z.real, z.imag))

        xs = list(w["embedding.weight"][row])
        for l in range(3):
            p, new = f"layers.{l}.", []
            f = [lin(norm(x, p + "norm_1"), p + "qkv").view(8, 4) for x in xs]
            for t, x in enumerate(xs):
                first, heads = (max(0, t - 5) if l % 2 == 0 else 0), []
                for h in range(4):
                    e = [(turn(f[t][h], t) @ turn(f[s][4 + h // 2], s) / 2).exp() for s in range(first, t + 1)]
                    total = sum(e) + w[p + "sinks"][h].exp()
                    heads.append(sum(a * f[s][6 + h // 2] for a, s in zip(e, range(first, t + 1))) / total)
                x = x + lin(torch.cat(heads), p + "out")
                gate, up = lin(norm(x, p + "norm_2"), p + "mlp_1").chunk(2)
                gate, up = gate.clamp(max=7), up.clamp(-7, 7)
                new.append(x + lin(gate / (1 + (-ALPHA * gate).exp()) * (up + 1), p + "mlp_2"))
            xs = new
        return torch.stack([w["unembedding.weight"] @ norm(x, "norm") for x in xs])

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
        m = model.to(dtype)
        y = m(tokens, mask)[0]
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(tokens[:, :8])[0] - m(tokens)[0][:, :8]).abs().max().item()
        cache = max(
            (cached(m, tokens.split(sizes, 1), mask) - y)[mask].abs().max().item() for sizes in ([1] * 14, [8, 1, 1, 4], [2, 12])
        )
        print(dtype, f"definition {far:.1e} causality {causal:.1e} cache {cache:.1e}")
        assert max(far, causal, cache) < small
