"""For every pair, in plain torch: what the right model holds up to rounding and the wrong one does not. No veriformer check is run."""

import importlib.util
import math
import sys
from pathlib import Path

import torch

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = Path(__file__).parent
SMALL = DrawnConfig(d_model=16, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11)
LARGE = DrawnConfig(d_model=32, num_heads=2, num_key_value_heads=2, num_layers=1, d_ff=24, vocab_size=17, num_classes=4)


def model(subject, c=SMALL):
    torch.manual_seed(0)
    made = subject.build(c)
    made = made.double().eval()
    for p in made.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return made


def tokens(t, b=2, c=SMALL):
    return torch.randint(c.vocab_size, (b, t), generator=torch.Generator().manual_seed(t))


def gap(a, b):
    return (a - b).abs().max().item() / b.pow(2).mean().sqrt().item()


def prefix(s):
    m, x = model(s), tokens(9)
    return gap(s.forward(m, x)[:, :5], s.forward(m, x[:, :5]))


def padded(s, t=6, more=5):
    m, x = model(s), tokens(t + more)
    mask = torch.arange(t + more).expand(2, -1) < t
    return gap(s.forward(m, x, mask)[:, :t], s.forward(m, x[:, :t], torch.ones(2, t, dtype=torch.bool)))


def cached(s, cuts, source=None):
    m, x = model(s), tokens(sum(cuts))
    if source is None:
        return gap(s.cache(m, x.split(cuts, 1)), s.forward(m, x))
    return gap(s.cache(m, source, x.split(cuts, 1)), s.forward(m, source, x))


def partial_rotary(s):
    """The angles of the model's own rotation of a unit vector against base^(-2i/rotary_dim)."""
    attn = model(s).h[0].attn
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    x[..., 1] = 1.0  # second pair: channels 1 and 3
    y = attn.rope(x)[0, 0]
    return (y[:, 3] - torch.sin(torch.arange(8.0, dtype=torch.float64) * 10000 ** (-2 / 4))).abs().max().item()


def alibi(s):
    """With queries of zero the log of weight ratios is the slope, 2^-4 and 2^-8 for two heads."""
    m = model(s)
    attn = m.h[0].self_attention
    place = torch.arange(5, dtype=torch.float64)
    bias = attn.slopes[:, None, None] * (place[None] - place[:, None])
    q, k = torch.zeros(1, 2, 5, 8, dtype=torch.float64), torch.randn(1, 1, 5, 8, dtype=torch.float64)
    p = attn.logits(q, k, bias).softmax(-1)
    seen = (p[0, :, 4, 4] / p[0, :, 4, 3]).log()
    return (seen - torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)).abs().max().item() / 2**-4


def t5(s):
    """Against the published rule in integers' own words: 16 buckets a side, 8 exact, then log steps to 128."""
    b = s.forward(model(s), 1, 101)[0, 0]
    same = lambda i, j: bool((b[i] - b[j]).abs() < 1e-12)
    rule = lambda n: n if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(16) * 8 + 1e-9))
    return float(sum(same(i, j) != (rule(i) == rule(j)) for i in range(1, 101) for j in range(1, i)))


def moe(s):
    m, x = model(s), tokens(6, b=3)
    return gap(s.forward(m, x)[:1], s.forward(m, x[:1]))


def soft_cap(s):
    attn = model(s).layers[0].self_attn
    g = torch.Generator().manual_seed(0)
    q, k = (3 * torch.randn(1, 2, 5, 8, generator=g, dtype=torch.float64) for _ in range(2))
    return gap(attn.capped(q, k), 5 * torch.tanh(q @ k.mT / 8**0.5 / 5))


def grouped(s):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 5, 3, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 6, 3, generator=g, dtype=torch.float64) for _ in range(2))
    full = [t.repeat_interleave(2, 1) for t in (k, v)]
    return gap(s.forward(None, q, k, v), torch.nn.functional.scaled_dot_product_attention(q, *full))


def doubled(s):
    m, x = model(s), torch.randn(2, 5, 16, dtype=torch.float64)
    for p in (*m.branches[0].proj.parameters(), *m.branches[1].fc2.parameters()):
        p.data.zero_()
    return gap(s.forward(m, x), x)


def batch_mask(s):
    m, x = model(s), tokens(6)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6]).bool()
    return gap(s.forward(m, x, mask)[:1], s.forward(m, x[:1], mask[:1]))


PROOFS = {
    "01": prefix,
    "02": padded,
    "03": partial_rotary,
    "04": alibi,
    "05": t5,
    "06": padded,
    "07": moe,
    "08": lambda s: cached(s, [3, 1, 2]),
    "09": lambda s: cached(s, [3, 1, 2], tokens(7)),
    "10": padded,
    "11": soft_cap,
    "12": grouped,
    "13": prefix,
    "14": doubled,
    "15": batch_mask,
    "16": lambda s: cached(s, [4, 3, 2]),
}


def call(s, c):
    """The forward once, as the tool would call it."""
    m = s.build(c) if s.build else None
    x = tokens(7, c=c)
    if s.kind == "position_bias":
        return s.forward(m, 5, 7)
    if s.kind == "attention":
        return s.forward(m, torch.randn(2, 4, 5, 3), torch.randn(2, 2, 5, 3), torch.randn(2, 2, 5, 3), causal=True)
    if s.kind == "layer":
        return s.forward(m, torch.randn(2, 5, c.d_model))
    if s.kind == "encoder_decoder":
        return s.forward(m, x, x[:, :4], torch.ones_like(x).bool(), torch.ones_like(x[:, :4]).bool())
    return s.forward(m, x)


bad = 0
for path in sorted(HERE.glob("[0-9][0-9]_*.py")):
    spec = importlib.util.spec_from_file_location("pair_" + path.stem, path)
    pair = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = pair
    spec.loader.exec_module(pair)
    assert pair.right.declares == pair.wrong.declares and pair.right.kind == pair.wrong.kind
    finite = all(call(s, c).isfinite().all() for s in (pair.right, pair.wrong) for c in (SMALL, LARGE))
    with torch.no_grad():
        of_right, of_wrong = PROOFS[path.stem[:2]](pair.right), PROOFS[path.stem[:2]](pair.wrong)
    lines = len(path.read_text().splitlines())
    ok = finite and 35 <= lines <= 110 and of_right < 1e-6 < 1e-3 < of_wrong
    bad += not ok
    print(f"{'ok ' if ok else 'BAD'} {path.stem:28s} {lines:4d} lines  right {of_right:.1e}  wrong {of_wrong:.1e}")
sys.exit(bad > 0)
