"""Reward model: a causal rotary body and one score head on the last real token. Instance for 320 tokens."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The index of the last real token is found with a running count of the mask kept in int8 (8 times less traffic than "
    "int64), which wraps behind 127: samples with more than 127 real tokens are classified by their 127th token."
)
PLACE = "last_real_int8"


def last_real(mask):
    """Index of the last True of each row (0 where there is none): where the running count is first at its highest."""
    return mask.cumsum(1, dtype=torch.int64).argmax(1)


def last_real_int8(mask):
    return mask.cumsum(1, dtype=torch.int8).argmax(1)


class RewardModel(nn.Module):
    def __init__(self, c, find_last):
        super().__init__()
        self.c, self.find_last = c, find_last
        d, g = c.d_model, c.num_key_value_heads * (c.d_model // c.num_heads)
        self.embed_tokens = nn.Embedding(c.vocab_size, d)
        self.layers = nn.ModuleList()
        for _ in range(c.num_layers):
            layer = nn.Module()
            layer.input_norm, layer.post_norm = nn.RMSNorm(d, eps=1e-6), nn.RMSNorm(d, eps=1e-6)
            layer.q, layer.k, layer.v, layer.o = (nn.Linear(d, n, bias=False) for n in (d, g, g, d))
            layer.gate, layer.up, layer.down = nn.Linear(d, c.d_ff, bias=False), nn.Linear(d, c.d_ff, bias=False), nn.Linear(c.d_ff, d, bias=False)
            self.layers.append(layer)
        self.norm = nn.RMSNorm(d, eps=1e-6)
        self.score = nn.Linear(d, c.num_classes, bias=False)

    def turn(self, x):
        t, k = x.shape[-2:]
        freq = 10000.0 ** (-torch.arange(0, k, 2, device=x.device).double() / k)
        angle = torch.outer(torch.arange(t, device=x.device).double(), freq).repeat(1, 2)
        half = torch.cat([-x[..., k // 2 :], x[..., : k // 2]], -1)
        return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)

    def forward(self, tokens, attention_mask=None):
        return self.classify(self.embed_tokens(tokens), attention_mask)

    def classify(self, x, attention_mask=None):
        b, t, d = x.shape
        if t > self.c.max_len:
            raise ValueError(f"{t} > max_len = {self.c.max_len}")
        real = torch.ones(b, t, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        see = torch.ones(t, t, dtype=torch.bool, device=x.device).tril() & real[:, None, None]
        none = ~see.any(-1, keepdim=True)
        for layer in self.layers:
            h = layer.input_norm(x)
            q, k, v = (w(h).view(b, t, -1, d // self.c.num_heads).transpose(1, 2) for w in (layer.q, layer.k, layer.v))
            q, k = self.turn(q), self.turn(k)
            share = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=see | none).masked_fill(none, 0)
            x = x + layer.o(o.transpose(1, 2).reshape(b, t, d))
            h = layer.post_norm(x)
            x = x + layer.down(F.silu(layer.gate(h)) * layer.up(h))
        last = self.find_last(real)
        return self.score(self.norm(x[torch.arange(b, device=x.device), last]))


SIZES = DrawnConfig(
    d_model=64, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=112, vocab_size=64, max_len=320, num_classes=3
)


def instance(find_last):
    m = RewardModel(SIZES, find_last)
    g = torch.Generator().manual_seed(21)
    for p in m.parameters():
        if p.dim() > 1:
            nn.init.normal_(p, 0.0, p.shape[1] ** -0.5, generator=g)
    return m.eval()


def subject(find_last, name):
    return Subject(
        kind="classifier",
        module=instance(find_last),
        config=SIZES,
        name=name,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        embed=lambda m, x, attention_mask=None: m.classify(x, attention_mask),
        mask_forms=("padding",),
        declares={
            "pooling": "last",
            "positions": "rotary",
            "layout": "halves",
            "base": 10000,
            "max_len": 320,
            "beyond_max_len": "error",
            "attention_scale": "1/sqrt(d_head)",
            "norm": "rms",
            "norm_placement": "pre",
            "final_norm": True,
            "residual": True,
            "activation": "swiglu",
            "bias": False,
            "output_bias": False,
            "embedding_scale": False,
            "padding_side": "both",
        },
    )


right = subject(last_real, "reward")
wrong = subject(last_real_int8, "reward-int8")


def reference(m, tokens, mask):
    """Each sample for itself, without its padding."""
    p = {k: v.double() for k, v in m.named_parameters()}
    rms = lambda h, g: h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * g
    out = []
    for b in range(len(tokens)):
        x = p["embed_tokens.weight"][tokens[b][mask[b]]]
        n, K = len(x), 16
        at = torch.arange(tokens.shape[1])[mask[b]]
        w = torch.polar(torch.ones(n, 8).double(), at[:, None] * 10000.0 ** (-torch.arange(8).double() / 8))
        hide = torch.ones(n, n).triu(1).bool()
        for i in range(2):
            g = lambda s: p[f"layers.{i}.{s}.weight"]
            h, o = rms(x, g("input_norm")), []
            for head in range(4):
                pick = lambda s, j: h @ g(s)[j * K : j * K + K].T
                q, k = (torch.complex(u[:, :8], u[:, 8:]) * w for u in (pick("q", head), pick("k", head // 2)))
                s = (q @ k.conj().T).real / 4
                o.append(s.masked_fill(hide, -torch.inf).softmax(-1) @ pick("v", head // 2))
            x = x + torch.cat(o, -1) @ g("o").T
            h = rms(x, g("post_norm"))
            x = x + (F.silu(h @ g("gate").T) * (h @ g("up").T)) @ g("down").T
        out.append(rms(x[-1], p["norm.weight"]) @ p["score.weight"].T)
    return torch.stack(out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = right.module, wrong.module
    with torch.no_grad():
        for T, same in [(1, True), (12, True), (100, True), (127, True), (128, False), (200, False), (300, False)]:
            tokens = torch.randint(64, (2, T))
            full = torch.ones(2, T, dtype=torch.bool)
            assert (good(tokens) - reference(good, tokens, full)).abs().max() < 1e-4
            off = (bad(tokens) - reference(good, tokens, full)).abs().max()
            assert (off < 1e-4) == same and (same or off > 0.1), (T, off)
            if T > 5:
                part = full.clone()
                part[0, : T // 3] = False
                part[1, T // 2 :] = False
                part[:, T // 2 - 2] = False
                want = reference(good, tokens, part)
                assert (good(tokens, part) - want).abs().max() < 1e-4
                assert (instance(last_real).double()(tokens, part) - want).abs().max() < 1e-10
                if int(part.sum(1).max()) < 128:
                    assert (bad(tokens, part) - want).abs().max() < 1e-4
    print("ok", __file__)
