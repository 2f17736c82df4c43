"""A decoder block in the way of a JAX port: pure functions over a dictionary of arrays (registered, so that torch finds
them), RMSNorm, ALiBi-free causal attention and a GELU network. Only that it is causal is declared."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The first sublayer binds its input anew (`x = norm(x)`) before the residual is added: attention is added to the "
    "normalised state, and the identity path of the residual stream ends at each layer. The second sublayer is right. "
    "Multiplying the input by a number changes nothing any more, which a pre-norm block passes on."
)
PLACE = "wrong_block: x = rms_norm(params['ln_1'], x)"


def rms_norm(gain, x):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).to(x.dtype) * gain


def attention(params, x, mask):
    q, k, v = torch.einsum("btd,ndhk->nbhtk", x, params["wqkv"])
    logits = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    weights = torch.where(mask, logits, torch.finfo(logits.dtype).min).softmax(-1) * mask
    return torch.einsum("bhts,bhsk,hkd->btd", weights, v, params["wo"])


def mlp(params, x):
    return F.gelu(x @ params["up"] + params["up_bias"]) @ params["down"] + params["down_bias"]


def block(params, x, mask):
    h = rms_norm(params["ln_1"], x)
    x = x + attention(params, h, mask)
    h = rms_norm(params["ln_2"], x)
    return x + mlp(params, h)


def wrong_block(params, x, mask):
    x = rms_norm(params["ln_1"], x)
    x = x + attention(params, x, mask)
    h = rms_norm(params["ln_2"], x)
    return x + mlp(params, h)


def init(c):
    d, h = c.d_model, c.num_heads

    def normal(*shape, fan):
        return torch.randn(*shape) / math.sqrt(fan)

    return {
        "ln_1": torch.ones(d), "wqkv": normal(3, d, h, d // h, fan=d), "wo": normal(h, d // h, d, fan=d),
        "ln_2": torch.ones(d), "up": normal(d, c.d_ff, fan=d), "up_bias": torch.zeros(c.d_ff),
        "down": normal(c.d_ff, d, fan=c.d_ff), "down_bias": torch.zeros(d),
    }  # fmt: skip


class Pure(nn.Module):
    def __init__(self, params, apply):
        super().__init__()
        self.params, self.apply_fn = nn.ParameterDict(params), apply

    def forward(self, x, attention_mask=None):
        at = torch.arange(x.shape[1], device=x.device)
        mask = (at[:, None] >= at[None, :])[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        return self.apply_fn(self.params, x, mask)


def make(apply):
    return Subject(
        kind="layer",
        name="functional block",
        build=lambda c: Pure(init(c), apply),
        forward=lambda layer, x, attention_mask=None: layer(x, attention_mask),
        declares={"causal": True},
    )


right, wrong = make(block), make(wrong_block)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    good, bad = right.build(c), wrong.build(c)
    bad.load_state_dict(good.state_dict())
    p = {k: v.detach().double() for k, v in good.params.items()}
    x0 = torch.randn(2, 7, 12) * 2
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False

    def slow(x):
        def unit(y):
            return torch.stack([r / math.sqrt(sum(float(a) ** 2 for a in r) / 12 + 1e-6) for r in y])

        h, out = unit(x) * p["ln_1"], torch.zeros_like(x)
        for i in range(3):
            q, k, v = (h @ p["wqkv"][j, :, i] for j in range(3))
            for t in range(len(x)):
                e = [math.exp(float(q[t] @ k[s]) / 2) for s in range(t + 1)]
                out[t] += sum(a / sum(e) * v[s] for s, a in enumerate(e)) @ p["wo"][i]
        x = x + out
        return x + F.gelu(unit(x) * p["ln_2"] @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

    truth = [slow(x0[b][mask[b]].double()) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        far = []
        for m in (good, bad):
            x = x0.to(dtype)
            y = m.to(dtype)(x, mask)
            far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
            assert (m(x[:, :4]) - m(x)[:, :4]).abs().max() < small
            assert (m(x[1:, :5]) - y[1:, :5]).abs().max() < small
        deaf = [(m(3 * x) - m(x)).abs().max().item() for m in (good, bad)]
        print(dtype, "right %.1e wrong %.2f" % tuple(far), "three times the input moves", deaf)
        assert far[0] < small and far[1] > 0.5 and deaf[0] > 1 and deaf[1] < 1e-4
