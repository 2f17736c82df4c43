"""A decoder under muP (Tensor Programs V), as a company that transfers its learning rates writes it: scores are divided by
d_head, not by its root; the embedding is multiplied by a constant and the logits by base width over width; no gains in
the norms; squared ReLU (Primer). Rotary positions, a preallocated cache that is written in place.

Why it is right: muP asks for 1/d_head and for the width multiplier of the readout; both are constants of the sizes. Below:
against a definition in loops, causal, blind to padding on both sides, cache equal to no cache, beams reordered."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

BASE_WIDTH, INPUT_MULTIPLIER = 4, 3.0


def unit_rms(x):
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def spin(x, start):
    size = x.shape[-1]
    rate = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
    angle = torch.arange(start, start + x.shape[2], dtype=torch.float64, device=x.device)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, seen, start, store):
        h = unit_rms(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        q, k = spin(q, start), spin(k, start)
        if store is not None:
            end = start + x.shape[1]
            store["k"][:, :, start:end], store["v"][:, :, start:end] = k, v
            k, v = store["k"][:, :, :end], store["v"][:, :, :end]
        scores = q @ k.mT / q.shape[-1]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        x = x + self.wo((weights @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(unit_rms(x)).relu().square())


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.readout = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None, start=0, stores=None):
        at = torch.arange(start + tokens.shape[1], device=tokens.device)
        seen = (at <= at[start:, None])[None, None]
        if mask is not None:
            seen = seen & mask.bool()[:, None, None, : len(at)]
        x = self.embedding(tokens) * INPUT_MULTIPLIER
        for layer, store in zip(self.layers, stores or [None] * len(self.layers)):
            x = layer(x, seen, start, store)
        return self.readout(unit_rms(x)) * (BASE_WIDTH / x.shape[-1])


def cached(model, chunks, attention_mask=None, reorder=None):
    total, like = sum(c.shape[1] for c in chunks), model.embedding.weight
    width = like.shape[1] // model.layers[0].heads
    shape = (chunks[0].shape[0], model.layers[0].heads, total, width)
    with torch.no_grad():
        stores = [{n: like.new_zeros(shape) for n in "kv"} for _ in model.layers]
        start, outputs = 0, []
        for i, chunk in enumerate(chunks):
            outputs.append(model(chunk, attention_mask, start, stores))
            start += chunk.shape[1]
            if i == 0 and reorder is not None:
                stores = [{n: s[reorder].clone() for n, s in store.items()} for store in stores]
                attention_mask = None if attention_mask is None else attention_mask[reorder]
    return torch.cat(outputs, 1)


def make(**declares):
    return Subject(
        kind="decoder", name="muP decoder", build=Decoder, cache=cached, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": [8, 16], "num_heads": [2, 4]},
    )  # fmt: skip


declared = make(
    attention_scale="1/d_head", positions="rotary", layout="halves", base=10000, norm="rms", norm_placement="pre",
    final_norm=True, residual=True, activation="other", bias=False, norm_bias=False, output_bias=False, tied=False,
    padding_side="both", causal=True, embedding_scale=False, sparse=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=8, num_heads=2, num_layers=2)
    model = Decoder(c)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 6:], mask[1, :3] = False, False

    def slow(row):
        def unit(x):
            return x / (x @ x / 8 + 1e-6) ** 0.5

        def turn(z, t):
            z = torch.complex(z[:2].contiguous(), z[2:].contiguous()) * torch.exp(
                1j * t * torch.tensor([1, 0.01], dtype=torch.float64)
            )
            return torch.cat((z.real, z.imag))

        xs = [w["embedding.weight"][i] * 3.0 for i in row.tolist()]
        for l in range(2):
            q, k, v = ([w[f"layers.{l}.w{n}.weight"] @ unit(x) for x in xs] for n in "qkv")
            new = []
            for t, x in enumerate(xs):
                heads = []
                for r in (slice(0, 4), slice(4, 8)):
                    e = torch.stack([turn(q[t][r], t) @ turn(k[s][r], s) / 4.0 for s in range(t + 1)]).softmax(0)
                    heads.append(sum(a * v[s][r] for s, a in enumerate(e)))
                x = x + w[f"layers.{l}.wo.weight"] @ torch.cat(heads)
                new.append(x + w[f"layers.{l}.down.weight"] @ (w[f"layers.{l}.up.weight"] @ unit(x)).relu() ** 2)
            xs = new
        return torch.stack([w["readout.weight"] @ unit(x) * 0.5 for x in xs])

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        m = model.to(dtype)
        y = m(tokens, mask)
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(tokens[:, :4]) - m(tokens)[:, :4]).abs().max().item()
        cache = (cached(m, tokens.split((3, 1, 2, 2), 1), mask) - y)[mask].abs().max().item()
        order = torch.tensor([1, 0])
        beams = cached(m, tokens.split((4, 1, 3), 1), mask, order)
        other = m(torch.cat((tokens[order, :4], tokens[:, 4:]), 1), mask[order])
        beam = (beams - other)[:, 4:][mask[order][:, 4:]].abs().max().item()
        print(dtype, f"definition {far:.1e} causality {causal:.1e} cache {cache:.1e} beams {beam:.1e}")
        assert max(far, causal, cache, beam) < small
