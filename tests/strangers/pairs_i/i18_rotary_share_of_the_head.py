"""GPT-NeoX in small: rotary positions on a part of each head (4 channels), parallel residual with a norm for each branch,
an untied `embed_out`; a cache of rotated keys."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The angles of the 4 rotated channels go down by the width of the head instead of the width that is rotated: the second "
    "pair turns at 10000 ** (-2 / d_head) instead of 10000 ** (-2 / 4), ten times as fast in heads of 8. Scores still "
    "depend on distances alone, but not by the base that is declared."
)
PLACE = "WrongRotary.width"
ROTARY = 4


class Rotary(nn.Module):
    def __init__(self, head_size):
        super().__init__()
        self.head_size = head_size

    def width(self):
        return ROTARY

    def forward(self, x, start):
        part, rest = x[..., :ROTARY], x[..., ROTARY:]
        inv_freq = 1.0 / 10000 ** (torch.arange(0, ROTARY, 2, dtype=torch.float64, device=x.device) / self.width())
        t = torch.arange(start, start + x.shape[-2], dtype=torch.float64, device=x.device)
        emb = torch.outer(t, inv_freq).repeat(1, 2)
        half = torch.cat((-part[..., ROTARY // 2 :], part[..., : ROTARY // 2]), -1)
        return torch.cat((part * emb.cos().to(x.dtype) + half * emb.sin().to(x.dtype), rest), -1)


class WrongRotary(Rotary):
    def width(self):
        return self.head_size


class NeoXLayer(nn.Module):
    def __init__(self, c, rotary):
        super().__init__()
        d, self.heads = c.d_model, c.num_heads
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query_key_value, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.h_to_4h, self.h_from_4h = nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d)
        self.rotary = rotary(d // c.num_heads)

    def forward(self, x, seen, past):
        b, t, d = x.shape
        qkv = self.query_key_value(self.input_layernorm(x)).view(b, t, self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, -1)  # per head
        start = 0 if past is None else past[0].shape[-2]
        q, k = self.rotary(q, start), self.rotary(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), -2), torch.cat((past[1], v), -2)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        attended = self.dense((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + attended + self.h_from_4h(F.gelu(self.h_to_4h(self.post_attention_layernorm(x)))), (k, v)


class NeoX(nn.Module):
    def __init__(self, c, rotary):
        super().__init__()
        self.embed_in = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(NeoXLayer(c, rotary) for _ in range(c.num_layers))
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.embed_out = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None):
        before = 0 if past is None else past[0][0].shape[-2]
        total = before + tokens.shape[1]
        seen = torch.ones(total, total, dtype=torch.bool, device=tokens.device).tril()[before:]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None, None, :total]
        x, kept = self.embed_in(tokens), []
        for layer, old in zip(self.layers, past or [None] * len(self.layers)):
            x, new = layer(x, seen, old)
            kept.append(new)
        return self.embed_out(self.final_layer_norm(x)), kept


def cached(model, chunks, attention_mask=None, reorder=None):
    past, outputs = None, []
    for i, chunk in enumerate(chunks):
        y, past = model(chunk, attention_mask, past)
        outputs.append(y)
        if i == 0 and reorder is not None:
            past = [tuple(z[reorder] for z in layer) for layer in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
    return torch.cat(outputs, 1)


def make(rotary):
    return Subject(
        kind="decoder",
        name="gpt-neox",
        build=lambda c: NeoX(c, rotary),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
        cache=cached,
        domain={"d_model": [16, 32], "num_heads": [2]},
        declares={
            "positions": "rotary", "rotary_dim": ROTARY, "base": 10000, "layout": "halves", "norm": "layer",
            "final_norm": True, "bias": True, "output_bias": False, "tied": False, "activation": "gelu",
            "attention_scale": "1/sqrt(d_head)", "padding_side": "both", "norm_placement": "pre", "structure": "other",
        },
    )  # fmt: skip


right, wrong = make(Rotary), make(WrongRotary)


if __name__ == "__main__":
    torch.manual_seed(0)
    for width in (16, 32):
        c = DrawnConfig(d_model=width, num_heads=2, num_layers=2)
        good, bad = right.build(c), wrong.build(c)
        with torch.no_grad():
            for name, p in good.named_parameters():
                p.normal_(float("norm" in name and name.endswith("weight")), 0.4)
        bad.load_state_dict(good.state_dict())
        w = {k: v.double() for k, v in good.state_dict().items()}
        tokens = torch.randint(0, 11, (2, 9))
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, :3] = False

        def slow(row):
            def lin(x, n):
                return x @ w[n + ".weight"].T + w[n + ".bias"]

            def norm(x, n):
                return F.layer_norm(x, (width,), w[n + ".weight"], w[n + ".bias"])

            def turn(z, at):
                z = z.clone()
                for i, rate in enumerate((1.0, 0.01)):
                    angle = torch.tensor(at * rate, dtype=torch.float64)
                    a, b = z[i].clone(), z[i + 2].clone()
                    z[i], z[i + 2] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
                return z

            x, size = w["embed_in.weight"][row], width // 2
            for l in range(2):
                p = f"layers.{l}."
                fused, heads = lin(norm(x, p + "input_layernorm"), p + "query_key_value"), []
                for h in range(2):
                    q, k, v = fused[:, 3 * size * h : 3 * size * (h + 1)].split(size, 1)
                    rows = []
                    for t in range(len(row)):
                        e = torch.stack([turn(q[t], t) @ turn(k[s], s) / size**0.5 for s in range(t + 1)]).softmax(0)
                        rows.append(e @ v[: t + 1])
                    heads.append(torch.stack(rows))
                y = lin(F.gelu(lin(norm(x, p + "post_attention_layernorm"), p + "h_to_4h")), p + "h_from_4h")
                x = x + lin(torch.cat(heads, 1), p + "dense") + y
            return norm(x, "final_layer_norm") @ w["embed_out.weight"].T

        truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(tokens, mask)[0]
                far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
                assert (cached(m, tokens.split((2, 4, 1, 2), 1), mask) - y)[mask].abs().max() < small
                swapped = cached(m, tokens.split((4, 5), 1), mask, torch.tensor([1, 0]))
                other = torch.cat((tokens[:, :4].flip(0), tokens[:, 4:]), 1)
                assert (swapped - m(other, mask.flip(0))[0])[:, 4:].abs().max() < small
            print(width, dtype, "right %.1e wrong %.2f" % tuple(far))
            assert far[0] < small and far[1] > 0.1
