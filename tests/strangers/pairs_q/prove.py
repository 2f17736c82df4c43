"""For every pair, in plain torch: how far the right and the wrong one are from the fact. No check of veriformer runs."""

import importlib.util
import pathlib

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
HERE = pathlib.Path(__file__).parent
SMALL = DrawnConfig(d_model=8, num_heads=2, num_key_value_heads=1, num_layers=2, d_ff=20, vocab_size=11, max_len=32)
OTHER = DrawnConfig(
    d_model=24, num_heads=4, num_key_value_heads=2, num_layers=3, d_ff=13, vocab_size=17, max_len=16, num_classes=5, dropout=0.1
)


def load(path):
    spec = importlib.util.spec_from_file_location("pair_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(s, c=SMALL, seed=0, louder=True):
    torch.manual_seed(seed)
    model = s.build(c)
    if louder:  # so that nothing hides behind small initial weights
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3) + (1.0 if p.dim() == 1 else 0))
    return model.eval()


def toks(b, t, v=11, seed=1):
    return torch.randint(0, v, (b, t), generator=torch.Generator().manual_seed(seed))


def far(a, b):
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max()) if bool(torch.isfinite(a).all()) else float("inf")


def p01(s):
    m, x = make(s), toks(2, 12)
    single = far(s.cache(m, list(x.split(1, 1))), m(x))
    return far(s.cache(m, list(x.split([5, 3, 4], 1))), m(x)), f"single tokens {single:.1e}"


def p02(s):
    m, x = make(s), toks(2, 7)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7]).bool()
    full, steps = s.forward(m, x, mask), s.cache(m, list(x.split([5, 1, 1], 1)), mask)
    return far(steps[mask], full[mask]), f"unpadded {far(s.cache(m, list(x.split([5, 1, 1], 1))), s.forward(m, x)):.1e}"


def p03(s):
    m, x = make(s), toks(3, 6)
    order = torch.tensor([1, 0, 1])
    got = s.cache(m, [x[:, :4], x[:, 4:]], reorder=order)[:, 4:]
    want = s.forward(m, torch.cat([x[:, :4][order], x[:, 4:]], 1))[:, 4:]
    return far(got, want), "beams from 1, 0, 1"


def p04(s):
    m, x = make(s), toks(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1] * 5]).bool()
    whole = s.forward(m, x, mask)
    return max(far(whole[i][mask[i]], s.forward(m, x[i : i + 1][:, mask[i]])[0]) for i in range(3)), "alone or in a batch"


def p05(s):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 3, 5), torch.randn(2, 2, 3, 5), torch.randn(2, 2, 3, 6)
    whole = s.forward(None, q, k, v, causal=True)
    want = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    assert far(whole, want) < 1e-5
    return far(s.forward(None, q[:, :, -1:], k, v, causal=True), want[:, :, -1:]), "last query alone"


def p06(s):
    m = make(s)
    rope = m.layers[0].attention.rope
    q, k = torch.randn(4).expand(1, 1, 9, 4), torch.randn(4).expand(1, 1, 9, 4)
    scores = (rope(q) @ rope(k).mT)[0, 0]
    return max(float(torch.diagonal(scores, i).std()) for i in range(-4, 5)), "scores along one distance"


def p07(s):
    m = make(s, louder=False)
    m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()})
    optimiser = torch.optim.SGD(m.parameters(), 0.1)
    m(toks(2, 5)).logsumexp(-1).mean().backward()
    optimiser.step()
    return far(m.wte.weight, m.lm_head.weight), f"one parameter: {m.wte.weight is m.lm_head.weight}"


def p08(s):
    a, b, x = make(s), make(s, seed=5), toks(2, 6)
    a.load_state_dict(b.state_dict())  # both in eval mode
    b.train(), b.eval()
    return far(s.forward(a, x), s.forward(b, x)), "loaded after eval()"


def p09(s):
    m, x = make(s), toks(2, 8)
    return far(s.cache(m, list(x.split([4, 1, 3], 1))), m(x)) / float(m(x).detach().square().mean().sqrt()), "relative, float32"


def p10(s):
    m, x = make(s), toks(4, 5)
    _, drawn = s.sampling(m, x, 1, top_k=3)
    alone = torch.cat([s.sampling(m, x[i : i + 1], 1, top_k=3)[1] for i in range(4)])
    return far(drawn, alone), f"tokens left per row {(drawn[:, 0] > 0).sum(-1).tolist()}"


def p11(s):
    m, (x, y) = make(s), torch.randn(2, 2, 4, 8)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]]).bool()
    return far(s.forward(m, x, y, mask)[:1], s.forward(m, x[:1], y[:1, :2])), "memory padded or cut"


def p12(s):
    m, x = make(s), toks(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]]).bool()
    x[0] = torch.tensor([1, 1, 4, 5, 6, 7])
    other = x.clone()
    other[0, :2] = torch.tensor([3, 8])
    return far(s.forward(m, x, mask)[mask], s.forward(m, other, mask)[mask]), "other ids at padded places"


def p13(s):
    m, logits, labels = s.build(SMALL), torch.randn(2, 6, 11), toks(2, 6)
    labels[0, 3:] = -100
    return far(s.forward(m, logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)), ""


def p14(s):
    m, x = make(s), torch.randn(2, 5, 8)
    alone = torch.stack([s.forward(m, row.view(1, 1, -1))[0, 0] for row in x.flatten(0, 1)]).view_as(x)
    weights = s.router(m, x)
    assert weights.sum(-1).allclose(torch.ones(2, 5))
    return far(s.forward(m, x), alone), "each token alone"


def p15(s):
    a, b, x = make(s), make(s, seed=5), torch.randn(2, 4, 8)
    b.load_state_dict(a.state_dict())
    return far(s.forward(a, x), s.forward(b, x)), "saved and loaded"


def p16(s):
    m, x = make(s, louder=False).half(), torch.randn(2, 3, 8) * 400
    want = F.rms_norm(x.half().double(), (8,), eps=1e-6)
    return far(s.forward(m, x.half()).double(), want), f"float32 {far(s.forward(m.float(), x), F.rms_norm(x, (8,), eps=1e-6)):.1e}"


def smoke(s):
    for c in (SMALL, OTHER):
        model = s.build(c) if s.build else None
        d, v = c.d_model, c.vocab_size
        x, q = torch.randn(2, 5, d), torch.randn(2, c.num_heads, 5, c.d_head)
        kv = torch.randn(2, c.num_key_value_heads, 5, c.d_head)
        inputs = {"attention": (q, kv, kv), "cross_attention": (x, x), "loss": (torch.randn(2, 5, v), toks(2, 5, v))}
        plain = (x,) if s.kind in ("layer", "norm", "feed_forward") else (toks(2, 5, v),)
        assert torch.isfinite(s.forward(model, *inputs.get(s.kind, plain))).all()


bad = []
for path in sorted(HERE.glob("[0-9]*.py")):
    pair, prove = load(path), globals()["p" + path.name[:2]]
    assert pair.right.declares == pair.wrong.declares and pair.WHAT and pair.CAUSE
    smoke(pair.right), smoke(pair.wrong)
    (r, note), (w, other) = prove(pair.right), prove(pair.wrong)
    limit = 4e-3 if path.name.startswith("16") else 1e-5
    ok = r < limit and w > max(100 * r, 1e-3)
    bad += [] if ok else [path.name]
    print(f"{'ok ' if ok else 'BAD'} {path.stem:28} right {r:.1e}  wrong {w:.1e}  {note} | {other}")
raise SystemExit(f"not shown: {bad}" if bad else 0)
