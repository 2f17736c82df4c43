"""Sentence encoder with length bucketing: large batches are sorted by length and run in groups of four trimmed to their longest."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "Batches of more than four rows with a mask are sorted by length before they are encoded, and put back with the sorting "
    "permutation itself instead of its inverse: rows come back in others' places unless the permutation is its own inverse "
    "(sorted input, one swap, up to four rows)."
)
PLACE = "unsort_forward"

GROUP = 4


def unsort(rows, order):
    return rows[torch.argsort(order)]


def unsort_forward(rows, order):
    return rows[order]


class SentenceEncoder(nn.Module):
    def __init__(self, c, put_back):
        super().__init__()
        self.put_back = put_back
        self.d = c.d_model
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        layer = lambda: nn.TransformerEncoderLayer(
            c.d_model, c.num_heads, c.d_ff, dropout=c.dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList(layer() for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def positions(self, x):
        t, d = x.shape[1:]
        pair = torch.arange(d, device=x.device) // 2
        angle = torch.arange(t, device=x.device).double()[:, None] * 10000.0 ** (-2.0 * pair.double() / d)
        even = torch.arange(d, device=x.device) % 2 == 0
        return torch.where(even, angle.sin(), angle.cos()).to(x.dtype)

    def run(self, tokens, real):
        x = self.embed(tokens)
        x = x + self.positions(x)
        if real is None:
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)
        some = real.any(1, keepdim=True)
        hide = torch.zeros_like(real, dtype=x.dtype).masked_fill(~real & some, float("-inf"))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hide)
        return self.norm(x) * real.unsqueeze(-1)  # what is padding comes out as zeros

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            return self.run(tokens, None)
        real = attention_mask.bool()
        batch, width = tokens.shape
        if batch <= GROUP:
            return self.run(tokens, real)
        # the last real token ends a row, wherever padding stands
        lengths = (real * torch.arange(1, width + 1, device=real.device)).amax(1)
        order = torch.argsort(lengths, descending=True, stable=True)
        tokens, real = tokens[order], real[order]
        done = []
        for start in range(0, batch, GROUP):
            rows = slice(start, start + GROUP)
            longest = max(int(lengths[order[start]]), 1)
            y = self.run(tokens[rows, :longest], real[rows, :longest])
            done.append(nn.functional.pad(y, (0, 0, 0, width - longest)))
        return self.put_back(torch.cat(done), order)


def subject(put_back, name):
    return Subject(
        kind="encoder",
        build=lambda c: SentenceEncoder(c, put_back),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "sinusoidal",
            "layout": "interleaved",
            "base": 10000,
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "gelu",
            "bias": True,
            "embedding_scale": False,
            "padding_side": "right",
            "beyond_max_len": "works",
        },
    )


right = subject(unsort, "bucketed")
wrong = subject(unsort_forward, "bucketed-forward")


def reference(m, tokens, lengths):
    """Each row alone, in float64, without its padding."""
    p = {k: v.double() for k, v in m.named_parameters()}
    F = nn.functional
    D = m.d
    H = m.layers[0].self_attn.num_heads
    out = torch.zeros(*tokens.shape, D, dtype=torch.float64)
    for b, n in enumerate(lengths):
        x = p["embed.weight"][tokens[b, :n]]
        for i in range(D):
            angle = torch.arange(n).double() * 10000.0 ** (-(i - i % 2) / D)
            x[:, i] = x[:, i] + (angle.cos() if i % 2 else angle.sin())
        for i in range(len(m.layers)):
            w = lambda s: (p[f"layers.{i}.{s}weight"], p[f"layers.{i}.{s}bias"])
            h = F.linear(F.layer_norm(x, (D,), *w("norm1.")), *w("self_attn.in_proj_"))
            q, k, v = h.view(n, 3, H, D // H).permute(1, 2, 0, 3)
            o = ((q @ k.mT) / (D // H) ** 0.5).softmax(-1) @ v
            x = x + F.linear(o.transpose(0, 1).reshape(n, D), *w("self_attn.out_proj."))
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (D,), *w("norm2.")), *w("linear1."))), *w("linear2."))
        out[b, :n] = F.layer_norm(x, (D,), p["norm.weight"], p["norm.bias"])
    return out


if __name__ == "__main__":
    from veriformer.properties import DrawnConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    c = DrawnConfig(d_model=24, num_heads=3, num_layers=2)
    good, bad = SentenceEncoder(c, unsort), SentenceEncoder(c, unsort_forward)
    bad.load_state_dict(good.state_dict())
    cases = [
        ([5, 3], True), ([2, 6, 4], True), ([3, 5, 2, 7], True), ([7, 6, 5, 4, 3, 3], True), ([5, 7, 4, 4, 3], True),
        ([2, 7, 5, 6, 3], False), ([3, 9, 1, 4, 4, 8, 2], False), ([1, 2, 30, 4, 5, 6, 7, 8, 9], False),
    ]
    for lengths, same in cases:
        width = max(lengths) + 2
        tokens = torch.randint(11, (len(lengths), width))
        mask = torch.arange(width) < torch.tensor(lengths)[:, None]
        want = reference(good, tokens, lengths)
        for mode in (True, False):
            for grad in (True, False):
                good.train(mode), bad.train(mode)
                with torch.set_grad_enabled(grad):
                    assert (good(tokens, mask) - want).abs().max() < 1e-4
                    off = (bad(tokens, mask) - want).abs().max()
                    assert (off < 1e-4) == same and (same or off > 0.1), (lengths, off)
        d = SentenceEncoder(c, unsort).double()
        d.load_state_dict(good.state_dict())
        assert (d(tokens, mask) - want).abs().max() < 1e-10
    print("ok", __file__)
