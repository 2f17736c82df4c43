"""Plain torch: for each pair, how far a stated fact is violated by the right one (rounding) and by the wrong one. No check is run."""

import importlib.util
import sys
from pathlib import Path

import torch

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = [
    DrawnConfig(),
    DrawnConfig(d_model=24, num_heads=3, num_key_value_heads=1, num_layers=3, d_ff=28, vocab_size=17, max_len=40, num_classes=4),
    DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=1, d_ff=12, vocab_size=13, max_len=24),
]
PROOF = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=24, vocab_size=13, max_len=32)


def make(subject, c, dtype=torch.float64):
    torch.manual_seed(0)
    model = subject.build(c) if subject.build else None
    return model.to(dtype).eval() if isinstance(model, torch.nn.Module) else model


def gap(a, b):
    return ((a - b).abs().max() / b.square().mean().sqrt()).item()


def tokens(c, *shape, seed=1):
    return torch.randint(0, c.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=2):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def prefix(s, m, c):
    x = tokens(c, 2, 7)
    return gap(s.forward(m, x[:, :4]), s.forward(m, x)[:, :4])


def prefix_embeddings(s, m, c):
    x = normal(2, 11, c.d_model)
    return gap(s.forward(m, x[:, :3]), s.forward(m, x)[:, :3])


def cached(s, m, c):
    x = tokens(c, 2, 9)
    return gap(s.cache(m, list(x.split([3, 1, 2, 1, 2], 1))), s.forward(m, x))


def cached_left_padded(s, m, c):
    x, mask = tokens(c, 2, 8), torch.ones(2, 8, dtype=torch.bool)
    mask[1, :3] = False
    got = s.cache(m, list(x.split([5, 1, 2], 1)), attention_mask=mask)
    return gap(got[mask], s.forward(m, x, mask)[mask])


def alone(s, m, c):
    x = tokens(c, 3, 6)
    return gap(s.forward(m, x[1:2]), s.forward(m, x)[1:2])


def right_padding(s, m, c):
    """Outputs of 5 tokens alone, and with three padded ones behind them whatever they are."""
    worst = 0.0
    for seed in (3, 4):
        x = torch.cat([tokens(c, 2, 5), tokens(c, 2, 3, seed=seed)], 1)
        mask = torch.arange(8).expand(2, 8) < 5
        want, got = s.forward(m, x[:, :5], torch.ones(2, 5, dtype=torch.bool)), s.forward(m, x, mask)
        worst = max(worst, gap(got if got.dim() == 2 else got[:, :5], want))
    return worst


def shifted(s, m, c):
    x = tokens(c, 2, 8)
    mask = torch.arange(8).expand(2, 8) >= 3
    return gap(s.forward(m, x, mask)[:, 3:], s.forward(m, x[:, 3:], torch.ones(2, 5, dtype=torch.bool)))


def t5_rule(s, m, c):
    """Which distances share a bucket: written anew from the paper (8 exact ones a side, then logarithmic up to 128)."""
    import math

    def bucket(n):
        n_ = abs(n)
        large = 8 + int(math.log(n_ / 8) / math.log(16) * 8 + 1e-9) if n_ >= 8 else n_
        return min(large, 15) + (16 if n > 0 else 0)

    with torch.no_grad():
        bias = s.forward(m, 60, 60)[:, 30]
    same = (bias[:, :, None] == bias[:, None, :]).all(0)
    want = torch.tensor([[bucket(a - 30) == bucket(b - 30) for b in range(60)] for a in range(60)])
    return (same != want).double().mean().item()


def position_wise(s, m, c):
    x = normal(2, 5, c.d_model)
    one = torch.stack([torch.stack([s.forward(m, x[b : b + 1, t : t + 1])[0, 0] for t in range(5)]) for b in range(2)])
    return gap(s.forward(m, x), one)


def rectangles(s, m, c):
    """Share of tokens whose pixels are no 4 x 4 square."""
    images = normal(1, *s.image).requires_grad_()
    out, bad = s.patches(m, images), 0
    for n in range(out.shape[1]):
        (g,) = torch.autograd.grad(out[0, n].sum(), images, retain_graph=True)
        hit = (g[0] != 0).any(0)
        rows, columns = hit.any(1).nonzero().flatten(), hit.any(0).nonzero().flatten()
        good = hit.sum() == 16 and len(rows) == 4 and len(columns) == 4
        bad += not (good and rows[0] == n // 3 * 4 and columns[0] == n % 3 * 4)
    return bad / out.shape[1]


def cached_seq2seq(s, m, c):
    source, target = tokens(c, 2, 5), tokens(c, 2, 7, seed=5)
    return gap(s.cache(m, source, list(target.split([2, 1, 3, 1], 1))), s.forward(m, source, target))


def future(s, m, c):
    x = tokens(c, 2, 7)
    y = x.clone()
    y[:, 4:] = (y[:, 4:] + 1) % c.vocab_size
    return gap(s.forward(m, x)[:, :4], s.forward(m, y)[:, :4])


def shared(s, m, c):
    lists = [x for x in m.modules() if isinstance(x, torch.nn.ModuleList)]
    return float(sum(len(x) - len({id(y) for y in x}) for x in lists))


def silent(s, m, c):
    with torch.no_grad():
        for p in (m.attn.out.weight, m.mlp.fc_out.weight, m.mlp.fc_out.bias):
            p.zero_()
    x = normal(2, 5, c.d_model)
    return gap(s.forward(m, x), x)


def capped(s, m, c):
    x, p = 3 * normal(2, 5, c.d_model), s.projections(m)
    q, k, v = ((x @ p[n].T).unflatten(-1, (c.num_heads, -1)).transpose(1, 2) for n in "qkv")
    cap = s.declares["soft_cap"]
    scores = cap * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / cap)
    w = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf).softmax(-1)
    return gap(s.forward(m, x), (w @ v).transpose(1, 2).flatten(2) @ p["o"].T)


def gradient(s, m, c):
    q, k, v = (normal(1, h, 3, 4, seed=h + i).requires_grad_() for i, h in enumerate((4, 2, 2)))
    out = s.forward(m, q, k, v, causal=True)
    k_, v_ = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    want = torch.nn.functional.scaled_dot_product_attention(q, k_, v_, is_causal=True)
    assert gap(out, want) < 1e-12
    g = normal(*out.shape, seed=9)
    pairs = zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(want, (q, k, v), g), strict=True)
    return max(gap(a, b) for a, b in pairs)


def isometry(s, m, c):
    x, p = normal(1, 2, 6, 8), torch.arange(6)
    return gap(s.forward(m, x, p).norm(dim=-1), x.norm(dim=-1))


def share_at_random(s, m, c):
    x = torch.randint(3, c.vocab_size, (64, 1024), generator=torch.Generator().manual_seed(0))
    inputs, labels = s.forward(m, x, 7)
    chosen = labels != -100
    changed = (chosen & (inputs != 2) & (inputs != x)).sum() / chosen.sum()
    return abs(changed.item() - 0.1 * (1 - 1 / (c.vocab_size - 3)))


TESTS = {
    1: prefix, 2: cached_left_padded, 3: alone, 4: t5_rule, 5: right_padding, 6: right_padding, 7: right_padding,
    8: position_wise, 9: rectangles, 10: cached_seq2seq, 11: right_padding, 12: future, 13: shared, 14: silent, 15: shifted,
    16: capped, 17: cached, 18: cached, 19: prefix_embeddings, 20: gradient, 21: isometry, 22: share_at_random,
}  # fmt: skip
ROUNDING = {22: 0.01}


def call_once(s, c):
    torch.manual_seed(0)
    m = s.build(c) if s.build else None
    t = torch.randint(0, c.vocab_size, (2, 7))
    x, e = torch.randn(2, 7, c.d_model), torch.ones(2, 7, dtype=torch.bool)
    arguments = {
        "decoder": (t,), "encoder": (t,), "classifier": (x if s.inputs == "embeddings" else t,), "layer": (x,),
        "self_attention": (x,), "feed_forward": (x,), "position_bias": (7, 9), "masking": (t, 0),
        "rotary": (torch.randn(2, c.num_heads, 7, c.d_head), torch.arange(7)), "encoder_decoder": (t, t[:, :5]),
        "attention": (torch.randn(2, c.num_heads, 7, c.d_head), *torch.randn(2, 2, c.num_key_value_heads, 7, c.d_head).unbind(0)),
    }[s.kind]  # fmt: skip
    out = s.forward(m, *arguments)
    for y in out if isinstance(out, tuple) else (out,):
        assert torch.isfinite(y.double()).all()
    if s.kind in ("decoder", "encoder", "layer", "self_attention") and "mask" in str(s.forward.__code__.co_varnames):
        e[0, 4:], e[1, :2] = False, False
        half = s.forward(m.to(torch.bfloat16), arguments[0] if arguments[0].dtype == torch.long else x.bfloat16(), e)
        assert torch.isfinite(half.float()).all()
    return m


def main():
    failed = 0
    for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
        spec = importlib.util.spec_from_file_location("pair_" + path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        number = int(path.name[:2])
        assert module.right.declares == module.wrong.declares and module.WHAT and module.CAUSE
        for subject in (module.right, module.wrong):
            for c in SIZES:
                call_once(subject, c)
        if isinstance(call_once(module.right, PROOF), torch.nn.Module) and number != 13:
            a, b = make(module.right, PROOF).state_dict(), make(module.wrong, PROOF).state_dict()
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a), path.name
        test = TESTS[number]
        r, w = (test(s, make(s, PROOF), PROOF) for s in (module.right, module.wrong))
        good = r < ROUNDING.get(number, 1e-9) and w > max(1e-3, 3 * r)
        failed += not good
        print(f"{'ok ' if good else 'BAD'} {path.stem:36} {test.__name__:20} right {r:.1e}  wrong {w:.1e}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
