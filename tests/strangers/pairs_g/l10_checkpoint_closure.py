"""Pre-LN encoder with activation checkpointing for long inputs: beyond 64 tokens each layer is recomputed in the backward pass."""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject

WHAT = (
    "Activation checkpointing, used beyond 64 tokens, is given a closure over the loop variable; when the backward pass "
    "recomputes a layer the variable stands at the last one, so every layer's gradient is taken from the last layer's weights "
    "and activations (outputs are right, one layer is right, short inputs are right)."
)
PLACE = "late"

CHECKPOINT_FROM = 64


def bound(layers, x, bias):
    for layer in layers:
        x = checkpoint(functools.partial(layer, bias=bias), x, use_reentrant=False)
    return x


def late(layers, x, bias):
    for layer in layers:
        x = checkpoint(lambda h: layer(h, bias=bias), x, use_reentrant=False)
    return x


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, bias):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        dots = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if bias is None:
            weights = dots.softmax(-1)
        else:
            weights = dots.masked_fill(bias, torch.finfo(dots.dtype).min).softmax(-1).masked_fill(bias, 0.0)
        return self.to_out((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, bias):
        x = x + self.drop(self.attn(self.ln1(x), bias))
        return x + self.drop(self.mlp(self.ln2(x)))


class Encoder(nn.Module):
    def __init__(self, c, run_checkpointed):
        super().__init__()
        self.run_checkpointed = run_checkpointed
        self.max_len = c.max_len
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.final = nn.LayerNorm(c.d_model)

    def encode(self, x, attention_mask=None):
        t = x.shape[1]
        if t > self.max_len:
            raise ValueError("sequence too long")
        x = x + self.places(torch.arange(t, device=x.device))
        bias = None if attention_mask is None else ~attention_mask.bool()[:, None, None, :]
        if t > CHECKPOINT_FROM and torch.is_grad_enabled():
            x = self.run_checkpointed(self.layers, x, bias)
        else:
            for layer in self.layers:
                x = layer(x, bias)
        return self.final(x)

    def forward(self, tokens, attention_mask=None):
        return self.encode(self.tokens(tokens), attention_mask)


def subject(run_checkpointed, name):
    return Subject(
        kind="encoder",
        build=lambda c: Encoder(c, run_checkpointed),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.encode(x, attention_mask),
        name=name,
        mask_forms=("padding",),
        declares={
            "causal": False,
            "positions": "learned",
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "layer",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "gelu",
            "embedding_scale": False,
            "padding_side": "right",
        },
    )


right = subject(bound, "checkpointed")
wrong = subject(late, "checkpointed-late")


def reference(p, tokens, mask, layers, heads):
    F = nn.functional
    D = p["tokens.weight"].shape[1]
    K = D // heads
    x = p["tokens.weight"][tokens] + p["places.weight"][: tokens.shape[1]]
    ln = lambda h, n: F.layer_norm(h, (D,), p[n + ".weight"], p[n + ".bias"])
    for i in range(layers):
        n = f"layers.{i}."
        q, k, v = (ln(x, n + "ln1") @ p[n + "attn.to_qkv.weight"].T).split(D, -1)
        o = [
            (q[..., a : a + K] @ k[..., a : a + K].mT / K**0.5).masked_fill(~mask[:, None], -torch.inf).softmax(-1) @ v[..., a : a + K]
            for a in range(0, D, K)
        ]
        x = x + torch.cat(o, -1) @ p[n + "attn.to_out.weight"].T
        h = F.gelu(ln(x, n + "ln2") @ p[n + "mlp.0.weight"].T + p[n + "mlp.0.bias"])
        x = x + h @ p[n + "mlp.2.weight"].T + p[n + "mlp.2.bias"]
    return ln(x, "final")


if __name__ == "__main__":
    from veriformer.properties import DrawnConfig

    torch.set_num_threads(1)
    torch.manual_seed(0)
    for layers, T, same in [(3, 10, True), (3, 64, True), (1, 100, True), (3, 65, False), (2, 100, False)]:
        c = DrawnConfig(d_model=24, num_heads=3, num_layers=layers, max_len=128)
        good, bad = Encoder(c, bound), Encoder(c, late)
        bad.load_state_dict(good.state_dict())
        tokens = torch.randint(11, (2, T))
        mask = torch.rand(2, T) > 0.3
        mask[:, 0] = True
        p = {k: v.detach().double().requires_grad_() for k, v in good.named_parameters()}
        want = reference(p, tokens, mask, layers, 3)
        probe = torch.randn_like(want)
        want_grads = torch.autograd.grad((want * probe).sum(), list(p.values()))
        for m, is_bad in ((good, False), (bad, True)):
            got = m(tokens, mask)
            assert (got - want).abs().max() < 1e-4
            grads = torch.autograd.grad((got * probe.float()).sum(), list(m.parameters()))
            off = max(((a - b).norm() / (1e-3 + b.norm())).item() for a, b in zip(grads, want_grads))
            assert off < 1e-3 if same or not is_bad else off > 0.05, (layers, T, is_bad, off)
        got = good.double()(tokens, mask)
        grads = torch.autograd.grad((got * probe).sum(), list(good.parameters()))
        assert max((a - b).abs().max() for a, b in zip(grads, want_grads)) < 1e-9
    print("ok", __file__)
