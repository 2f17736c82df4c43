"""Shows for every pair, in plain torch, that the right one is right and the wrong one is not. One line a pair."""

import importlib.util
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)
HERE = Path(__file__).parent
SIZES = SimpleNamespace(
    vocab_size=13, d_model=12, num_heads=4, num_key_value_heads=2, num_layers=3, d_ff=20, max_len=32, num_classes=3,
    dropout=0.0, d_head=3,
)


def load(number, side):
    spec = importlib.util.spec_from_file_location(f"f2_{number:02d}_{side}", HERE / f"{number:02d}_{side}.py")
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make(module, seed=0, noise=0.5, train=False, dtype=torch.float64, **sizes):
    """A model with weights that are nowhere 0 or 1 by accident."""
    torch.manual_seed(seed)
    model = module.subject.build(SimpleNamespace(**{**vars(SIZES), **sizes}))
    if isinstance(model, nn.Module):
        model = model.to(dtype).train(train)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(noise * torch.randn_like(p))
    return model


def far(a, b):
    return ((a - b).norm() / b.norm()).item()


def softmax_attention(q, k, v, allowed):
    """q, k, v [B,H,T,K], one query and head at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                keys = [s for s in range(k.shape[2]) if allowed[b, t, s]]
                scores = torch.stack([q[b, h, t] @ k[b, h, s] for s in keys]) / math.sqrt(q.shape[-1])
                weights = scores.exp() / scores.exp().sum()
                out[b, h, t] = sum(w * v[b, h, s] for w, s in zip(weights, keys))
    return out


def heads(x, n):
    return torch.stack(x.chunk(n, -1), 1)


def unheads(x):
    return torch.cat(x.unbind(1), -1)


def ln(x, m):
    c = x - x.mean(-1, keepdim=True)
    return c / ((c * c).mean(-1, keepdim=True) + m.eps).sqrt() * m.weight + m.bias


def lin(x, m):
    return x @ m.weight.T + (0 if m.bias is None else m.bias)


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def causal(b, t):
    return torch.tensor([[[s <= q for s in range(t)] for q in range(t)]] * b)


def padded(mask):
    return mask[:, None, :].expand(-1, mask.shape[1], -1)


def inputs(b=3, t=5, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, t, SIZES.d_model, generator=g, dtype=torch.float64)


MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)


def model_pair(number, reference, masks=(None,), shapes=((3, 5), (1, 1), (2, 7)), **sizes):
    """The right one equals the reference, in eval and train mode, gradients too; the wrong one does not."""
    right, wrong = load(number, "right"), load(number, "wrong")
    worst = 0.0
    for train in (False, True):
        for shape in shapes:
            for mask in masks:
                if mask is not None and mask.shape != shape:
                    continue
                extra = () if mask is None else (mask,)
                x = inputs(*shape)
                a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
                model = make(right, train=train, **sizes)
                y, z = right.subject.forward(model, a, *extra), reference(model, b, *extra)
                keep = torch.ones(shape, dtype=torch.bool) if mask is None else mask
                worst = max(worst, far(y[keep], z[keep]))
                probe = inputs(*shape, seed=7)
                (y * probe)[keep].sum().backward()
                (z * probe)[keep].sum().backward()
                worst = max(worst, far(a.grad, b.grad))
    assert worst < 1e-11, (number, worst)
    x = inputs(*shapes[0])
    model = make(wrong, **sizes)
    gap = far(wrong.subject.forward(model, x), reference(model, x))
    return worst, gap


def p01():
    def reference(m, x):
        h = lin(ln(x, m.ln_1), m.attn.c_attn)
        q, k, v = (heads(p, 4) for p in h.chunk(3, -1))
        x = x + lin(unheads(softmax_attention(q, k, v, causal(*x.shape[:2]))), m.attn.c_proj)
        return x + lin(gelu(lin(ln(x, m.ln_2), m.mlp.c_fc)), m.mlp.c_proj)

    worst, gap = model_pair(1, reference)
    assert gap > 1e-2
    return f"right {worst:.1e} from x + f(ln(x)), wrong {gap:.2f}"


def p02():
    def reference(m, x, mask=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        a = m.self_attn
        q, k, v = (heads(lin(x, p), 4) for p in (a.q_proj, a.k_proj, a.v_proj))
        x = ln(x + lin(unheads(softmax_attention(q, k, v, padded(mask))), a.out_proj), m.self_attn_layer_norm)
        return ln(x + lin(lin(x, m.fc1).clamp(min=0), m.fc2), m.final_layer_norm)

    worst, gap = model_pair(2, reference, masks=(None, MASK))
    assert gap < 1e-11  # without dropout they are the same
    x = inputs()
    said = []
    for side in ("right", "wrong"):
        s = load(2, side)
        m = make(s, dropout=0.3)
        said.append(far(s.subject.forward(m, x), reference(m, x)))
        m.train()
        assert far(s.subject.forward(m, x), s.subject.forward(m, x)) > 1e-2
    assert said[0] < 1e-11 and said[1] > 1e-2
    return f"eval with dropout 0.3: right {said[0]:.1e}, wrong {said[1]:.2f} from the layer without dropout"


def p03():
    def reference(m, x):
        g, n = m.kv_heads, m.heads
        w = m.fused_attn_ff_proj.weight
        k0, f = m.dim_head, m.ff_out.weight.shape[1]
        wq, wk, wv, wf, wg = w.split([n * k0, g * k0, g * k0, f, f])
        h = ln(x, m.norm)
        q, k, v = heads(h @ wq.T, n), heads(h @ wk.T, g), heads(h @ wv.T, g)
        k = torch.stack([k[:, i // (n // g)] for i in range(n)], 1)
        v = torch.stack([v[:, i // (n // g)] for i in range(n)], 1)
        gate = h @ wg.T
        ff = gate / (1 + (-gate).exp()) * (h @ wf.T)
        return x + lin(unheads(softmax_attention(q, k, v, causal(*x.shape[:2]))), m.attn_out) + lin(ff, m.ff_out)

    worst, gap = model_pair(3, reference)
    for kv in (1, 4):
        model_pair(3, reference, num_key_value_heads=kv)
    assert gap > 1e-2
    return f"right {worst:.1e} from scores / sqrt(d_head), wrong {gap:.2f}"


def p04():
    def rms(x, m):
        return x / ((x * x).mean(-1, keepdim=True) + m.eps).sqrt() * (1 + m.weight)

    def reference(m, x, mask=None):
        mask = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
        a, n, g = m.self_attn, 4, m.self_attn.num_key_value_heads
        h = rms(x, m.input_layernorm)
        q, k, v = heads(lin(h, a.q_proj), n), heads(lin(h, a.k_proj), g), heads(lin(h, a.v_proj), g)
        k = torch.stack([k[:, i // (n // g)] for i in range(n)], 1)
        v = torch.stack([v[:, i // (n // g)] for i in range(n)], 1)
        h = lin(unheads(softmax_attention(q, k, v, padded(mask) & causal(*x.shape[:2]))), a.o_proj)
        x = x + rms(h, m.post_attention_layernorm)
        h = rms(x, m.pre_feedforward_layernorm)
        h = lin(gelu_tanh(lin(h, m.mlp.gate_proj)) * lin(h, m.mlp.up_proj), m.mlp.down_proj)
        return x + rms(h, m.post_feedforward_layernorm)

    worst, gap = model_pair(4, reference, masks=(None, MASK))
    assert gap > 1e-2
    trained = []
    for side in ("right", "wrong"):
        s = load(4, side)
        m = make(s)
        s.subject.forward(m, inputs()).square().sum().backward()
        trained.append(sum(p.grad is None for p in m.parameters()))
    assert trained == [0, 1]
    s = load(4, "right")
    left = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    m = make(s)
    x = inputs()
    assert far(s.subject.forward(m, x, left)[1, 2:], s.subject.forward(m, x[1:2, 2:])[0]) < 1e-11
    return f"right {worst:.1e}, wrong {gap:.2f}; parameters without a gradient {trained}"


def p05():
    def reference(m, x):
        a, b = m.w12.weight.chunk(2, 0)
        gate = x @ b.T
        return (x @ a.T * gate / (1 + (-gate).exp())) @ m.w3.weight.T

    worst, gap = model_pair(5, reference)
    assert gap > 1e-2
    return f"right {worst:.1e} from silu(gate) * up, wrong {gap:.2f}"


def p06():
    worst, gap = model_pair(6, lambda m, x: lin(F.gelu(lin(x, m.w_1), approximate="tanh"), m.w_2))
    z = torch.linspace(-4, 4, 81, dtype=torch.float64)
    gaps = [(load(6, side).gelu(z) - F.gelu(z, approximate="tanh")).abs().max().item() for side in ("right", "wrong")]
    assert gaps[0] < 1e-12 and gaps[1] > 1e-3 and gap > 1e-4
    return f"right {worst:.1e}, wrong {gap:.4f}; worst of gelu on [-4, 4] {gaps[1]:.3f}"


def p07():
    worst, gap = model_pair(7, lambda m, x: F.layer_norm(x, x.shape[-1:], m.gamma, m.beta, m.eps))
    assert gap > 1e-2
    return f"right {worst:.1e} from F.layer_norm, wrong {gap:.3f}"


def p08():
    def reference(m, x):
        return x / ((x * x).mean(-1, keepdim=True) + m.variance_epsilon).sqrt() * m.weight

    worst, gap = model_pair(8, reference)
    assert gap < 1e-11  # the same in float64
    x = inputs() * 400
    errors = []
    for side in ("right", "wrong"):
        s = load(8, side)
        m = make(s).half()
        y = s.subject.forward(m, x.half())
        assert y.dtype == torch.float16
        errors.append(far(y.double(), reference(m.double(), x.half().double())))
    assert errors[0] < 2e-3 and not errors[1] < 0.5
    b = [far(load(8, s).subject.forward(make(load(8, s)).bfloat16(), inputs().bfloat16()).double(),
             reference(make(load(8, s)).bfloat16().double(), inputs().bfloat16().double())) for s in ("right", "wrong")]
    return f"float16 inputs of 400: right {errors[0]:.1e}, wrong {errors[1]:.2f} (bfloat16 {b[0]:.1e}, {b[1]:.1e})"


def p09():
    worst, gap = model_pair(9, lambda m, x: F.layer_norm(x, x.shape[-1:], m.weight, m.bias, m.eps))
    assert gap < 1e-11  # the forward is right in both
    errors = []
    for side in ("right", "wrong"):
        s = load(9, side)
        m = make(s)
        x = inputs().requires_grad_()
        r = x.detach().clone().requires_grad_()
        (s.subject.forward(m, x) * inputs(seed=3)).sum().backward()
        w, b = m.weight.detach().clone().requires_grad_(), m.bias.detach().clone().requires_grad_()
        (F.layer_norm(r, r.shape[-1:], w, b, m.eps) * inputs(seed=3)).sum().backward()
        assert far(m.weight.grad, w.grad) < 1e-11 and far(m.bias.grad, b.grad) < 1e-11
        errors.append(far(x.grad, r.grad))
    assert errors[0] < 1e-11 and errors[1] > 1e-3
    return f"gradient of x: right {errors[0]:.1e}, wrong {errors[1]:.3f}"


def p10():
    def reference(m, x):
        out = torch.zeros_like(x)
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                logits = m.router.linear.weight @ x[b, t]
                best = sorted(range(len(logits)), key=lambda e: -logits[e].item())[:2]
                total = sum(logits[e].exp() for e in best)
                for e in best:
                    net = m.experts[e].net
                    out[b, t] += logits[e].exp() / total * lin(gelu(lin(x[b, t], net[0])), net[2])
        return out

    worst, gap = model_pair(10, reference)
    assert gap > 1e-2
    s = load(10, "right")
    m = make(s)
    weights = s.subject.router(m, inputs())
    assert torch.allclose(weights.sum(-1), torch.ones(3, 5, dtype=torch.float64)) and ((weights > 0).sum(-1) == 2).all()
    s = load(10, "wrong")
    m, x = make(s), inputs()
    moved = far(s.subject.forward(m, x)[:, :2], s.subject.forward(m, x[:, :2]))
    assert moved > 1e-3
    return f"right {worst:.1e} from token by token, wrong {gap:.2f}; wrong: other tokens move a token by {moved:.2f}"


def p11():
    def reference(m, x):
        probs = F.softmax(x @ m.gate.weight.T, -1)
        kept = torch.where(probs >= probs.sort(-1, descending=True).values[..., 1:2], probs, 0.0)
        each = [(x @ m.experts.w_in[e]).clamp(min=0) @ m.experts.w_out[e] for e in range(4)]
        return sum(kept[..., e : e + 1] * each[e] for e in range(4))

    worst, gap = model_pair(11, reference)
    assert gap < 1e-11
    ratios = []
    for side in ("right", "wrong"):
        m = make(load(11, side), noise=0.0, d_model=64, d_ff=256)
        xavier = math.sqrt(2 / (64 + 256))
        ratios.append([m.experts.w_in.std().item() / xavier, m.experts.w_out.std().item() / xavier])
    assert all(abs(r - 1) < 0.02 for r in ratios[0]) and all(r < 0.5 for r in ratios[1])
    return f"std of the experts over Xavier's: right {ratios[0]}, wrong {ratios[1]}"


def losses(number, reference, cases):
    right, wrong = load(number, "right"), load(number, "wrong")
    worst, gap = 0.0, 0.0
    for logits, labels in cases:
        a, b, c = (logits.clone().requires_grad_() for _ in range(3))
        model = right.subject.build(SIZES) if right.subject.build else None
        y, z = right.subject.forward(model, a, labels), reference(b, labels)
        w = wrong.subject.forward(model if model is None else wrong.subject.build(SIZES), c, labels)
        for loss in (y, z, w):
            assert loss.shape == ()
            (3 * loss).backward()
        worst = max(worst, abs(y - z).item(), (a.grad - b.grad).abs().max().item())
        gap = max(gap, abs(w - z).item(), (c.grad - b.grad).abs().max().item())
    assert worst < 1e-11, (number, worst)
    return worst, gap


def loss_cases(ignore):
    g = torch.Generator().manual_seed(0)
    for b, t, v, share in ((2, 6, 7, 0.4), (1, 1, 5, 0.0), (3, 5, 11, 0.2), (2, 3, 9, 0.0)):
        logits = 3 * torch.randn(b, t, v, generator=g, dtype=torch.float64) + 1
        labels = torch.randint(2, v, (b, t), generator=g)
        labels[torch.rand(b, t, generator=g) < share] = ignore
        yield logits, labels
    yield logits.transpose(0, 1).contiguous().transpose(0, 1), labels


def p12():
    worst, gap = losses(
        12,
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=1, label_smoothing=0.1),
        list(loss_cases(1)),
    )
    assert gap > 1e-2
    s = load(12, "right")
    assert s.subject.forward(s.subject.build(SIZES), torch.randn(2, 3, 5), torch.ones(2, 3, dtype=torch.long)) == 0
    return f"right {worst:.1e} from F.cross_entropy, wrong {gap:.3f}"


def p13():
    worst, gap = losses(13, lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), list(loss_cases(-100)))
    x, y = next(iter(loss_cases(-100)))
    values, sizes = [], []
    for side in ("right", "wrong"):
        a = x.clone().requires_grad_()
        loss = load(13, side).subject.forward(None, a, y)
        values.append(loss.item())
        (loss / 8).backward()
        b = x.clone().requires_grad_()
        (F.cross_entropy(b.flatten(0, 1), y.flatten()) / 8).backward()
        sizes.append((a.grad.norm() / b.grad.norm()).item())
    assert abs(values[0] - values[1]) < 1e-12 and abs(sizes[0] - 1) < 1e-11 and abs(sizes[1] - 8) < 1e-9 and gap > 1e-2
    empty = torch.randn(2, 3, 5, requires_grad=True)
    loss = load(13, "right").subject.forward(None, empty, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0 and (empty.grad == 0).all()
    return f"gradient of loss / 8 over the derivative: right {sizes[0]:.3f}, wrong {sizes[1]:.3f}"


def p14():
    def reference(x, y):
        z = x.logsumexp(-1)[y != -100]
        return F.cross_entropy(x.flatten(0, 1), y.flatten()) + 0.01 * (z**2).mean()

    worst, gap = losses(14, reference, list(loss_cases(-100)))
    assert gap > 1e-2
    x, y = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [0, -100, 4]])
    loud = torch.where((y == -100)[..., None], 1e30, x)
    f = load(14, "right").subject.forward
    assert torch.allclose(f(None, loud, y), f(None, x, y)) and f(None, x, torch.full((2, 3), -100)) == 0
    return f"right {worst:.1e} from cross-entropy + c log(Z)^2, wrong {gap:.3f}"


def p15():
    def reference(s):
        if s < 20:
            return 6e-4 * s / 20
        part = min(1.0, (s - 20) / 180)
        return 6e-5 + (6e-4 - 6e-5) * (1 + math.cos(math.pi * part)) / 2

    worst, peak = [], []
    for side in ("right", "wrong"):
        s = load(15, side).subject
        cfg = s.build(SIZES)
        rates = [s.forward(cfg, i) for i in range(400)]
        worst.append(max(abs(r - reference(i)) for i, r in enumerate(rates)))
        peak.append(max(rates))
    assert worst[0] < 1e-15 and abs(peak[0] - 6e-4) < 1e-15 and peak[1] > 6.5e-4
    return f"highest rate: right {peak[0]:.2e}, wrong {peak[1]:.2e}, declared 6e-4"


def p16():
    found = []
    for side in ("right", "wrong"):
        s = load(16, side).subject
        m = make(load(16, side))
        groups = s.forward(m)
        params = [id(p) for g in groups for p in g["params"]]
        assert len(params) == len(set(params)) and set(params) == {id(p) for p in m.parameters()}
        decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
        plain = {id(p) for x in m.modules() if isinstance(x, nn.LayerNorm) for p in x.parameters()}
        plain |= {id(p) for n, p in m.named_parameters() if n.endswith("bias")}
        wide = {id(p) for x in m.modules() if isinstance(x, (nn.Linear, nn.Embedding)) for p in [x.weight]}
        assert wide <= decayed
        found.append(len(decayed & plain))
    assert found == [0, 2 * SIZES.num_layers + 1]
    return f"gains of norms that are decayed: right {found[0]}, wrong {found[1]}"


def p17():
    shares = []
    for side in ("right", "wrong"):
        s = load(17, side).subject
        v = 1000
        m = s.build(SimpleNamespace(vocab_size=v))
        tokens = torch.randint(0, v, (400, 500), generator=torch.Generator().manual_seed(1))
        before = tokens.clone()
        x, y = s.forward(m, tokens, 0)
        x2, y2 = s.forward(m, tokens, 0)
        assert torch.equal(tokens, before) and torch.equal(x, x2) and torch.equal(y, y2)
        assert not torch.equal(x, s.forward(m, tokens, 1)[0])
        chosen, special = y != -100, before < 4
        assert torch.equal(y[chosen], before[chosen]) and torch.equal(x[~chosen], before[~chosen])
        assert not (chosen & special).any()
        assert abs(chosen.sum() / (~special).sum() - 0.15) < 0.003
        n = chosen.sum()
        hidden = (x[chosen] == 3).sum() / n
        same = (x[chosen] == y[chosen]).sum() / n
        shares.append([round(q.item(), 3) for q in (hidden, 1 - hidden - same, same)])
    assert all(abs(a - b) < 0.01 for a, b in zip(shares[0], (0.8, 0.1, 0.1))) and shares[1][1] < 0.03
    return f"hidden, random, kept: right {shares[0]}, wrong {shares[1]}"


def p18():
    texts = ["low low low low low lower lower newest newest newest widest oxen boxen foxen coxen axen"] * 2
    table = load(18, "right").bytes_to_unicode()

    def learn(texts, count):
        corpus = [[table[b] for b in w.encode()] for t in texts for w in re.findall(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+", t)]
        learnt = []
        for _ in range(count):
            pairs = Counter(p for w in corpus for p in zip(w, w[1:]))
            top = max(pairs.values())
            learnt.append((top, {p for p, n in pairs.items() if n == top}))
            pair = yield learnt[-1]
            for w in corpus:
                i = 0
                while i + 1 < len(w):
                    if (w[i], w[i + 1]) == pair:
                        w[i : i + 2] = [w[i] + w[i + 1]]
                    i += 1

    bad = []
    for side in ("right", "wrong"):
        s = load(18, side).subject
        for corpus in (texts, load(18, side).CORPUS):
            m = s.train(corpus, 276)
            steps = learn(corpus, 20)
            _, best = next(steps)
            missed = 0
            for i, pair in enumerate(m.merges):
                missed += pair not in best
                if i < 19:
                    _, best = steps.send(pair)
            bad.append(missed)
        ids = s.vocabulary(m)
        assert sorted(ids.values()) == list(range(276))
        for text in ("the low lowest", "a  b\n\tc  ", "naïve 漢字 🙂!? it's", "", " ", "x_1 = 'y'"):
            assert s.decode(m, s.forward(m, text)) == text
            got = [m.decoder[i] for i in s.forward(m, text)]
            want = []
            for w in s.words(m, text):  # every merge in its order, over the whole word
                for a, b in m.merges:
                    i = 0
                    while i + 1 < len(w):
                        if w[i] == a and w[i + 1] == b:
                            w[i : i + 2] = [a + b]
                        i += 1
                want += w
            assert got == want, (got, want)
        built = s.build(SIZES)
        assert s.decode(built, s.forward(built, "newest tokens")) == "newest tokens" and len(built.encoder) == 320
    assert bad[:2] == [0, 0] and bad[2] > 0, bad
    return f"merges that were not the most frequent pair of the corpus, of 20: right {bad[:2]}, wrong {bad[2:]}"


def p19():
    said = []
    texts = ["unaffable playing", "The tokenization, of transformers!", "caf\u00e9 is quick", "x\u6f22y the", "", "a" * 101, "runs123"]
    for side in ("right", "wrong"):
        module = load(19, side)
        s, vocab = module.subject, module.load_vocab()
        m = s.build(SIZES)
        names = {i: p for p, i in vocab.items()}

        def cut(rest, prefix):
            """Recursively: the longest first piece, then the rest; None if it cannot be cut so."""
            if not rest:
                return []
            for n in range(len(rest), 0, -1):
                if prefix + rest[:n] in vocab:
                    tail = cut(rest[n:], "##")
                    return None if tail is None else [prefix + rest[:n], *tail]
            return None

        wrong = 0
        for text in texts:
            want = []
            for word in re.findall(r"\w+|[^\w\s]", text.lower()):
                pieces = cut(word, "") if len(word) <= 100 else None
                want += ["[UNK]"] if pieces is None else pieces
            wrong += [names[i] for i in s.forward(m, text)] != want
        said.append(wrong)
    assert said[0] == 0 and said[1] == 2, said
    return f"texts of 7 cut otherwise than WordPiece: right {said[0]}, wrong {said[1]}"


def p20():
    def best(word, scores, unk):
        table = {len(word): (0.0, [])}
        for i in range(len(word) - 1, -1, -1):
            options = []
            for j in range(i + 1, len(word) + 1):
                piece = word[i:j]
                if piece in scores or j == i + 1:
                    options.append((scores.get(piece, unk) + table[j][0], [piece, *table[j][1]]))
            table[i] = max(options, key=lambda o: o[0])
        return table[0]

    missed = []
    for side in ("right", "wrong"):
        s = load(20, side).subject
        m = s.build(SIZES)
        scores, ids = s.scores(m), s.vocabulary(m)
        assert abs(sum(math.exp(v) for v in scores.values()) - 1) < 1e-9
        names = {i: p for p, i in ids.items()}
        bad = 0
        for text in ("the tokenization", "attention to a transformer", "untokenized thing", "quick \u6f22!", "", "  a  b"):
            want, got_score = 0.0, 0.0
            for word in s.words(m, text):
                want += best("".join(word), scores, m.unk_score)[0]
            for i in s.forward(m, text):
                got_score += scores.get(names[i], m.unk_score)
            bad += abs(want - got_score) > 1e-9
        missed.append(bad)
        assert s.decode(m, s.forward(m, "attention to the transformer")) == "attention to the transformer"
    assert missed == [0, 1], missed
    return f"texts of 6 whose segmentation is not the most probable: right {missed[0]}, wrong {missed[1]}"


def p21():
    def reference(m, tokens, mask):
        d = m.d_model
        pos = torch.tensor(
            [[(math.sin, math.cos)[c % 2](t / 10000 ** ((c - c % 2) / d)) for c in range(d)] for t in range(tokens.shape[1])],
            dtype=torch.float64,
        )
        x = m.embedding.weight[tokens] * math.sqrt(d) + pos
        for layer in m.layers:
            q, k, v = (heads(p, layer.nhead) for p in lin(ln(x, layer.norm1), layer.in_proj).chunk(3, -1))
            x = x + lin(unheads(softmax_attention(q, k, v, padded(mask))), layer.out_proj)
            x = x + lin(lin(ln(x, layer.norm2), layer.linear1).clamp(min=0), layer.linear2)
        return ln(x, m.norm)

    errors = []
    tokens = torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(2))
    for side in ("right", "wrong"):
        s = load(21, side).subject
        for train in (False, True):
            m = make(load(21, side), noise=0.2, train=train)
            y, z = s.forward(m, tokens, MASK), reference(m, tokens, MASK)
            whole = far(s.forward(m, tokens), reference(m, tokens, torch.ones_like(MASK)))
            errors.append(max(whole, far(y[MASK], z[MASK])))
    s = load(21, "right").subject
    m = make(load(21, "right"), noise=0.2, dropout=0.4)
    assert far(s.forward(m, tokens), reference(m, tokens, torch.ones_like(MASK))) < 1e-11
    assert max(errors[:2]) < 1e-11 and min(errors[2:]) > 1e-2
    return f"right {max(errors[:2]):.1e} from E sqrt(d) + P, wrong {min(errors[2:]):.2f}"


if __name__ == "__main__":
    for number in range(1, 22):
        with torch.random.fork_rng():
            print(f"{number:02d} {globals()[f'p{number:02d}']()}", flush=True)
        right, wrong = load(number, "right").subject, load(number, "wrong").subject
        assert dict(right.declares) == dict(wrong.declares) and right.kind == wrong.kind
