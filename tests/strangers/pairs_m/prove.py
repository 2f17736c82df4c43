"""Shows of every pair, in plain torch, that `right` keeps to the fact up to rounding and `wrong` does not.

    python prove.py [NN ...]
"""

import importlib.util
import pathlib
import sys

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = pathlib.Path(__file__).parent
SMALL = DrawnConfig(d_model=12, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32)
LARGE = DrawnConfig(d_model=24, num_heads=3, num_key_value_heads=3, num_layers=3, d_ff=40, vocab_size=17, max_len=40,
                    num_classes=4, dropout=0.1)  # fmt: skip
ODD = DrawnConfig(d_model=9, num_heads=3, num_key_value_heads=3, num_layers=1, d_ff=14, vocab_size=7, max_len=16)
CHECKS = {}


def proves(number):
    return lambda f: CHECKS.setdefault(number, f)


def ids(c, *shape):
    return torch.randint(c.vocab_size, shape)


def gap(a, b):
    return (a - b).abs().max().item()


def later_token(s, m, c, T=9, t=4):
    a = ids(c, 2, T)
    b = a.clone()
    b[:, t + 1 :] = (b[:, t + 1 :] + 1) % c.vocab_size
    return gap(s.forward(m, a)[:, : t + 1], s.forward(m, b)[:, : t + 1])


def cached(s, m, c, cuts, source=None):
    x = ids(c, 2, sum(cuts))
    if source is None:
        return gap(s.forward(m, x), s.cache(m, list(x.split(cuts, 1))))
    return gap(s.forward(m, source, x), s.cache(m, source, list(x.split(cuts, 1))))


def pad_right(s, m, c, T=5, more=3):
    x = ids(c, 2, T)
    longer = torch.cat([x, ids(c, 2, more)], 1)
    mask = torch.ones_like(longer, dtype=torch.bool)
    mask[:, T:] = False
    return x, longer, mask


@proves("01")
def _(s, m, c):
    return later_token(s, m, c)


@proves("02")
def _(s, m, c):
    return cached(s, m, c, [3, 3, 2, 1])


@proves("03")
def _(s, m, c):
    """Bias of query 6 at keys 0..6, against the table looked up in the published buckets of distances 6..0."""
    got = m.position_bias(7, "cpu")[0, :, 6]
    return gap(got, m.relative_attention_bias.weight[[5, 4, 4, 3, 2, 1, 0]].T)


@proves("04")
def _(s, m, c):
    x = ids(c, 2, 9)
    return gap(s.forward(m, x[:, :5]), s.forward(m, x)[:, :5])


@proves("05")
def _(s, m, c):
    """q . k of turned vectors: the same at (5, 2) as at (8, 5)."""
    mod = sys.modules[type(m).__module__]
    q, k = (torch.randn(1, 1, 1, 6, dtype=torch.float64).expand(1, 9, 1, 6) for _ in "qk")
    q, k = mod.rope(q, m.table)[0, :, 0], mod.rope(k, m.table)[0, :, 0]
    return gap(q[5] @ k[2], q[8] @ k[5])


@proves("06")
def _(s, m, c):
    return later_token(s, m, c, t=3)


@proves("07")
def _(s, m, c):
    return max(later_token(s, m, c, t=t) for t in range(8))


@proves("08")
def _(s, m, c):
    x = ids(c, 3, 6)
    return max(later_token(s, m, c), gap(s.forward(m, x)[:1], s.forward(m, x[:1])))


@proves("09")
def _(s, m, c):
    x, beams = ids(c, 3, 6), torch.tensor([2, 0, 0])
    want = s.forward(m, torch.cat([x[beams, :4], x[:, 4:]], 1))[:, 4:]
    return max(gap(want, s.cache(m, [x[:, :4], x[:, 4:]], reorder=beams)[:, 4:]), 0.0)


@proves("10")
def _(s, m, c):
    x, y = ids(c, 3, 5), ids(c, 3, 5)
    y[0, 2] = -100
    want = F.cross_entropy(s.forward(m, x).flatten(0, 1), y.flatten())
    return gap(want, s.loss(m, x, y))


@proves("11")
def _(s, m, c):
    """1 minus whether each of 6 outputs depends on its own input."""
    x = ids(c, 1, 6)
    out = s.forward(m, x)
    reached = 0
    for t in range(6):
        other = x.clone()
        other[0, t] = (other[0, t] + 1) % c.vocab_size
        reached += gap(s.forward(m, other)[0, t], out[0, t]) > 1e-3
    return 1 - reached / 6


@proves("12")
def _(s, m, c):
    """Share of the pixels on which no token depends."""
    images = torch.randn(1, *s.image, requires_grad=True, dtype=torch.float64)
    s.patches(m, images).square().sum().backward()
    return (images.grad == 0).double().mean().item()


@proves("13")
def _(s, m, c):
    x = ids(c, 2, 6)
    return gap(s.forward(m, x), s.forward(m, x, torch.ones_like(x, dtype=torch.bool)))


@proves("14")
def _(s, m, c):
    """What enters layer 2 is what layer 1 gave."""
    seen = {}
    m.encoder.layers[0].register_forward_hook(lambda _m, _i, out: seen.update(out=out))
    m.encoder.layers[1].register_forward_pre_hook(lambda _m, args: seen.update(entered=args[0]))
    s.forward(m, ids(c, 2, 5))
    return gap(seen["out"], seen["entered"])


@proves("15")
def _(s, m, c):
    x, longer, mask = pad_right(s, m, c)
    s.forward(m, longer, torch.ones_like(mask))  # another call before
    return gap(s.forward(m, x), s.forward(m, longer, mask))


@proves("16")
def _(s, m, c):
    """Share of the parameters without a gradient."""
    s.forward(m, ids(c, 2, 5)).square().sum().backward()
    params = list(m.parameters())
    return sum(p.grad is None for p in params) / len(params)


@proves("17")
def _(s, m, c):
    return float(m.decoder.weight is not m.word_embeddings.weight)


@proves("18")
def _(s, m, c):
    assert cached(s, m, c, [1, 1, 1, 1, 1], ids(c, 2, 4)) < 1e-9  # single tokens are right in both
    return cached(s, m, c, [2, 3, 2], ids(c, 2, 4))


@proves("19")
def _(s, m, c):
    return cached(s, m, c, [2, 1, 1, 2], ids(c, 2, 7))


@proves("20")
def _(s, m, c):
    """Share of the parameters without a gradient."""
    s.forward(m, ids(c, 2, 5), ids(c, 2, 4)).square().sum().backward()
    params = list(m.parameters())
    return sum(p.grad is None for p in params) / len(params)


@proves("21")
def _(s, m, c):
    x, longer, mask = pad_right(s, m, c)
    return gap(s.forward(m, x), s.forward(m, longer, mask))


@proves("22")
def _(s, m, c):
    """Rows and columns that the pixels of token 0 span, beyond those of one patch."""
    images = torch.randn(1, *s.image, requires_grad=True, dtype=torch.float64)
    s.patches(m, images)[0, 0].square().sum().backward()
    _, _, rows, columns = images.grad.nonzero().unbind(1)
    return float((rows.max() - rows.min() + 1 - 4) + (columns.max() - columns.min() + 1 - 4))


def call_once(s, c):
    """Build, and call in evaluation, training and with masks where they are taken."""
    m = s.build(c)
    names = s.forward.__code__.co_varnames[: s.forward.__code__.co_argcount]
    if s.inputs == "embeddings":
        inputs = [torch.randn(2, 6, c.d_model)]
        assert s.patches(m, torch.randn(2, *s.image)).shape == (2, 6, c.d_model)
    else:
        inputs = [ids(c, 2, 6)] * (2 if s.kind == "encoder_decoder" else 1)
    want = (2, c.num_classes) if s.kind == "classifier" else (2, 6)
    for mode in (True, False):
        out = s.forward(m.train(mode), *inputs)
        assert out.shape[:2] == want and out.isfinite().all(), (s.name, out.shape)
    if "attention_mask" in names or "source_mask" in names:
        mask = torch.ones(2, 6, dtype=torch.bool)
        mask[0, 4:] = False
        mask[1] = False  # a sample of padding alone
        out = s.forward(m, *inputs, mask)
        out.sum().backward()
        assert out.isfinite().all(), s.name
        assert all(p.grad is None or p.grad.isfinite().all() for p in m.parameters()), s.name


def main():
    chosen = set(sys.argv[1:])
    failed = []
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        if chosen and path.stem[:2] not in chosen:
            continue
        spec = importlib.util.spec_from_file_location(f"pair_{path.stem}", path)
        mod = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = mod
        spec.loader.exec_module(mod)
        assert mod.WHAT and mod.CAUSE and mod.right.declares == mod.wrong.declares
        found = []
        for s in (mod.right, mod.wrong):
            for c in (SMALL, LARGE, ODD):
                try:
                    call_once(s, c)
                except ValueError as refusal:
                    assert c is ODD, refusal
            torch.manual_seed(1)
            m = s.build(SMALL).double().eval()
            for p in m.parameters():  # unit gain, so that nothing hides behind small initial weights
                if p.dim() > 1:
                    torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
            torch.manual_seed(2)
            found.append(float(CHECKS[path.stem[:2]](s, m, SMALL)))
        fine = found[0] < 1e-9 and found[1] > 1e-3
        failed += [] if fine else [path.stem]
        lines = len(path.read_text().splitlines())
        print(f"{'ok ' if fine else 'BAD'} {path.stem:24} right {found[0]:.1e}  wrong {found[1]:.1e}  {lines} lines")
        assert 40 <= lines <= 150
    print("all shown" if not failed else f"NOT shown: {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
