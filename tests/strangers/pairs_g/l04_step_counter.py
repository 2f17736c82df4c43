"""A stateful decoder for a voice assistant: it remembers what it was fed (keys, values and a step counter) until reset().

The instance is 512 tokens long; the deployment casts it with model.bfloat16().
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The step counter of cached decoding is a floating-point buffer, so model.bfloat16() converts it too; adding 1 to 256 "
    "gives 256 in bfloat16 and every later token gets position 256 (fine in float32 and for the first 256 tokens)."
)
PLACE = "FloatCounterDecoder.make_counter"


class SelfAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.past = None

    def heads(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def forward(self, x, visible, remember):
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        if remember:
            if self.past is not None:
                k, v = torch.cat([self.past[0], k], 2), torch.cat([self.past[1], v], 2)
            self.past = (k, v)
        scores = (q @ k.transpose(2, 3)).float() if q.dtype in (torch.float16, torch.bfloat16) else q @ k.transpose(2, 3)
        scores = (scores * q.shape[-1] ** -0.5).masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~visible, 0)
        return self.out((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, n_heads)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def forward(self, x, visible, remember):
        x = x + self.attention(self.norm1(x), visible, remember)
        return x + self.ff(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_layers, hidden, max_len):
        super().__init__()
        self.max_len = max_len
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, n_heads, hidden) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.logits = nn.Linear(dim, vocab)
        self.register_buffer("seen", self.make_counter(), persistent=False)

    def make_counter(self):
        return torch.zeros((), dtype=torch.long)

    def reset(self):
        self.seen.zero_()
        for layer in self.layers:
            layer.attention.past = None

    def forward(self, tokens, attention_mask=None, remember=False):
        n = tokens.shape[1]
        first = int(self.seen) if remember else 0
        past = self.layers[0].attention.past if remember else None
        s = n + (0 if past is None else past[0].shape[2])
        if s > self.max_len:
            raise ValueError(f"{s} tokens, but max_len is {self.max_len}")
        x = self.tokens(tokens) + self.positions(torch.arange(first, first + n, device=tokens.device))
        visible = torch.ones(n, s, dtype=torch.bool, device=x.device).tril(s - n)[None, None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None, :s].bool()
        for layer in self.layers:
            x = layer(x, visible, remember)
        if remember:
            self.seen += n
        return self.logits(self.norm(x))


class FloatCounterDecoder(Decoder):
    def make_counter(self):
        return torch.zeros(())


@torch.no_grad()
def feed(model, chunks, attention_mask=None):
    model.reset()
    out = [model(chunk, attention_mask, remember=True) for chunk in chunks]
    model.reset()
    return torch.cat(out, 1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    model.reset()
    new = tokens
    for _ in range(steps):
        logits = model(new, remember=True) if use_cache else model(tokens)
        new = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], 1)
    model.reset()
    return tokens


SIZES = DrawnConfig(d_model=32, num_heads=4, num_key_value_heads=4, num_layers=2, d_ff=64, vocab_size=64, max_len=512)


def instance(cls):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = cls(SIZES.vocab_size, SIZES.d_model, SIZES.num_heads, SIZES.num_layers, SIZES.d_ff, SIZES.max_len)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                nn.init.normal_(module.bias, std=0.1)
    return model.eval()


def subject(cls, name):
    return Subject(
        kind="decoder",
        module=instance(cls),
        config=SIZES,
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        cache=lambda m, chunks, attention_mask=None: feed(m, chunks, attention_mask),
        generate=generate,
        mask_forms=("padding",),
        declares={
            "causal": True,
            "positions": "learned",
            "max_len": 512,
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "relu",
            "bias": True,
            "output_bias": True,
            "tied": False,
            "embedding_scale": False,
            "padding_side": "right",
            "half_precision": True,
        },
    )


right = subject(Decoder, "voice")
wrong = subject(FloatCounterDecoder, "voice-float-counter")


def reference(m, tokens, mask=None):
    p = {k: v.double() for k, v in m.named_parameters()}
    T, D, H = tokens.shape[1], m.tokens.embedding_dim, SIZES.num_heads
    K = D // H
    lin = lambda h, n: h @ p[n + ".weight"].T + p[n + ".bias"]
    norm = lambda h, n: (h - h.mean(-1, keepdim=True)) / (h.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * p[n + ".weight"] + p[n + ".bias"]
    hide = torch.ones(T, T).triu(1).bool().expand(len(tokens), T, T)
    hide = hide if mask is None else hide | ~mask[:, None]
    x = p["tokens.weight"][tokens] + p["positions.weight"][:T]
    for i in range(SIZES.num_layers):
        h = norm(x, f"layers.{i}.norm1")
        q, k, v = (lin(h, f"layers.{i}.attention.{n}") for n in ("query", "key", "value"))
        o = [(q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(hide, -torch.inf).softmax(-1).nan_to_num(0) @ v[..., a : a + K] for a in range(0, D, K)]
        x = x + lin(torch.cat(o, -1), f"layers.{i}.attention.out")
        x = x + lin(lin(norm(x, f"layers.{i}.norm2"), f"layers.{i}.ff.0").relu(), f"layers.{i}.ff.2")
    return lin(norm(x, "norm"), "logits")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = instance(Decoder), instance(FloatCounterDecoder)
    tokens = torch.randint(64, (2, 300))
    mask = torch.rand(2, 300) > 0.2
    for T in (7, 300):
        want = reference(good, tokens[:, :T], mask[:, :T])
        sizes = (T - T // 2,) + (1,) * (T // 2)
        for m in (good, bad):
            assert (m(tokens[:, :T], mask[:, :T]) - want).abs().max() < 1e-4
            assert (feed(m, tokens[:, :T].split(sizes, 1), mask[:, :T]) - want).abs().max() < 1e-4
    assert (instance(Decoder).double()(tokens, mask) - want).abs().max() < 1e-9
    sizes = (200,) + (1,) * 100
    far = []
    for m in (good.bfloat16(), bad.bfloat16()):
        full = m(tokens).float()
        got = feed(m, tokens.split(sizes, 1)).float()
        diff = (got - full).abs().amax((0, 2))
        assert diff[:257].max() < 0.2, diff[:257].max()
        far.append(diff[257:].max().item())
    assert far[0] < 0.2 < 1.0 < far[1], far
    print("ok", __file__)
