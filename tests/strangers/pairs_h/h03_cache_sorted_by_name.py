"""A GPT-2 in functional style: a dict of arrays by name (as a port from JAX has it), a cache that is a dict by layer
name too, and a flat tuple in which the cache travels between two calls."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Between two calls the cache is flattened in the order of sorted(names), and read back by index: 'layer_10' sorts "
    "before 'layer_2'. Up to ten layers that is the same order; from eleven on most layers go on with the keys and "
    "values of another layer, so that cached decoding differs from the full pass."
)
PLACE = "flatten_wrong: `sorted(past)`"


def normal(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.02)


class Params(nn.Module):
    """Only a holder; all that is computed stands in functions below."""

    def __init__(self, c, flatten):
        super().__init__()
        d, f = c.d_model, c.d_ff
        self.layers, self.heads, self.flatten = c.num_layers, c.num_heads, flatten
        self.wte, self.wpe = normal(c.vocab_size, d), normal(c.max_len, d)
        self.g, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))
        self.block = nn.ModuleDict(
            {
                f"layer_{i}": nn.ParameterDict(
                    {
                        "qkv_w": normal(d, 3 * d), "qkv_b": normal(3 * d), "out_w": normal(d, d), "out_b": normal(d),
                        "up_w": normal(d, f), "up_b": normal(f), "down_w": normal(f, d), "down_b": normal(d),
                        "ln1_g": nn.Parameter(torch.ones(d)), "ln1_b": nn.Parameter(torch.zeros(d)),
                        "ln2_g": nn.Parameter(torch.ones(d)), "ln2_b": nn.Parameter(torch.zeros(d)),
                    }
                )
                for i in range(c.num_layers)
            }
        )  # fmt: skip


def ln(x, g, b):
    return F.layer_norm(x, x.shape[-1:], g, b, 1e-5)


def attention(p, x, heads, past):
    b, t, d = x.shape
    q, k, v = (y.view(b, t, heads, -1).transpose(1, 2) for y in (x @ p["qkv_w"] + p["qkv_b"]).split(d, -1))
    if past is not None:
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    s = k.shape[2]
    visible = torch.arange(s, device=x.device)[None] <= torch.arange(s - t, s, device=x.device)[:, None]
    weights = (q @ k.mT / (d // heads) ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, d) @ p["out_w"] + p["out_b"], (k, v)


def flatten_right(past):
    return tuple(past[f"layer_{i}"] for i in range(len(past)))


def flatten_wrong(past):
    return tuple(past[name] for name in sorted(past))


def gpt2(params, tokens, flat=None):
    """Return logits and the flat cache."""
    start = 0 if flat is None else flat[0][0].shape[2]
    x = params.wte[tokens] + params.wpe[start : start + tokens.shape[1]]
    past = {}
    for i in range(params.layers):
        name = f"layer_{i}"
        p = params.block[name]
        y, past[name] = attention(p, ln(x, p["ln1_g"], p["ln1_b"]), params.heads, None if flat is None else flat[i])
        x = x + y
        h = ln(x, p["ln2_g"], p["ln2_b"]) @ p["up_w"] + p["up_b"]
        x = x + F.gelu(h, approximate="tanh") @ p["down_w"] + p["down_b"]
    return ln(x, params.g, params.b) @ params.wte.T, params.flatten(past)


def cached(params, chunks, reorder=None):
    out, flat = [], None
    for n, chunk in enumerate(chunks):
        logits, flat = gpt2(params, chunk, flat)
        out.append(logits)
        if n == 0 and reorder is not None:
            flat = tuple((k[reorder], v[reorder]) for k, v in flat)
    return torch.cat(out, 1)


def make(flatten):
    return Subject(
        kind="decoder",
        name="functional gpt-2",
        build=lambda c: Params(c, flatten),
        forward=lambda params, tokens: gpt2(params, tokens)[0],
        cache=cached,
        declares={
            "causal": True, "positions": "learned", "tied": True, "activation": "gelu_tanh", "norm": "layer",
            "norm_placement": "pre", "final_norm": True, "output_bias": False,
        },
    )  # fmt: skip


right, wrong = make(flatten_right), make(flatten_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for layers in (2, 6, 10, 11, 12):
            c = DrawnConfig(num_layers=layers, d_model=16, num_heads=4)
            good, bad = right.build(c).to(dtype), wrong.build(c).to(dtype)
            for name, p in good.named_parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=p.shape[0] ** -0.5 if "block" in name else 1.0)
            bad.load_state_dict(good.state_dict())
            tokens = torch.randint(0, 11, (2, 12))
            whole = gpt2(good, tokens)[0]
            chunks = tokens.split([5, 1, 1, 3, 2], 1)
            a, b = ((cached(m, chunks) - whole).abs().max().item() for m in (good, bad))
            print(dtype, layers, f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.1 if layers > 10 else b < small)
            cut = gpt2(good, tokens[:, :7])[0]
            assert (cut - whole[:, :7]).abs().max() < small  # causal
            order = torch.tensor([1, 1])
            joined = torch.cat((tokens[order, :5], tokens[:, 5:]), 1)
            assert (cached(good, chunks, order)[:, 5:] - gpt2(good, joined)[0][:, 5:]).abs().max() < small
