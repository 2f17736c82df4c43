"""Shows in plain torch that each wrong file is wrong and each right one right. No veriformer is run (it is imported by the
files for Subject alone)."""

import copy
import importlib.util
import math
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
HERE = Path(__file__).parent
D = torch.float64


def load(number, which):
    (path,) = HERE.glob(f"{number:02d}_*_{which}.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (which == "wrong") == hasattr(module, "WHAT")
    return module


def sizes(**more):
    c = dict(d_model=16, num_heads=4, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=16,
             num_classes=3, dropout=0.0, d_head=4)
    return SimpleNamespace(**{**c, **more})


def build(module, **more):
    torch.manual_seed(0)
    return module.subject.build(sizes(**more)).double().eval()


def close(a, b):
    return torch.allclose(a, b, rtol=1e-8, atol=1e-9)


def rand(*shape, grad=False):
    return torch.randn(*shape, dtype=D, requires_grad=grad)


def reference_attention(q, k, v, allowed, cap=None):
    r = q.shape[1] // k.shape[1]
    k = torch.stack([k[:, h // r] for h in range(q.shape[1])], 1)
    v = torch.stack([v[:, h // r] for h in range(q.shape[1])], 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if cap:
        s = cap * torch.tanh(s / cap)
    return s.masked_fill(~allowed, -math.inf).softmax(-1) @ v


def p01(m):
    ok = True
    for T in (16, 40, 70):
        q, k, v = rand(2, 4, T, 8), rand(2, 2, T, 8), rand(2, 2, T, 8)
        ok &= close(m.flash(None, q, k, v, causal=True), reference_attention(q, k, v, torch.ones(T, T).bool().tril()))
        pad = torch.rand(2, 1, T, T) > 0.3
        pad[..., 0] = True
        ok &= close(m.flash(None, q, k, v, pad), reference_attention(q, k, v, pad))
    return ok


def same_grads(f, g, *inputs):
    a, b = f(*inputs), g(*inputs)
    w = torch.randn_like(a)
    ga, gb = torch.autograd.grad((a * w).sum(), inputs), torch.autograd.grad((b * w).sum(), inputs)
    return close(a, b), all(close(x, y) for x, y in zip(ga, gb))


def p02(m):
    q, k, v = rand(2, 4, 5, 4, grad=True), rand(2, 2, 5, 4, grad=True), rand(2, 2, 5, 3, grad=True)
    tri = torch.ones(5, 5).bool().tril()
    forward, backward = same_grads(lambda *a: m.attend(None, *a, causal=True),
                                   lambda *a: reference_attention(*a, tri), q, k, v)
    assert forward
    return backward


def p03(m):
    q, k, v = rand(2, 4, 5, 4, grad=True), rand(2, 2, 5, 4, grad=True), rand(2, 2, 5, 3, grad=True)
    tri = torch.ones(5, 5).bool().tril()
    forward, backward = same_grads(lambda *a: m.forward(None, *a, causal=True),
                                   lambda *a: reference_attention(*a, tri, cap=m.CAP), q, k, v)
    assert forward
    return backward


def p04(m):
    x = rand(2, 3, 4, grad=True)
    ok = True
    for dim in (-1, 1, 0):
        forward, backward = same_grads(lambda t: m.subject.forward(None, t, dim), lambda t: t.softmax(dim), x)
        assert forward
        ok &= backward
    return ok


def p05(m):
    model = build(m)
    x = rand(2, 3, 16, grad=True)
    g, b = rand(16, grad=True), rand(16, grad=True)
    forward, backward = same_grads(lambda *a: m.LayerNormFn.apply(*a, model.eps),
                                   lambda x, g, b: F.layer_norm(x, (16,), g, b, model.eps), x, g, b)
    assert forward
    return backward


def p06(m):
    ok = True
    for d in (6, 8, 16, 24):
        x = rand(2, 3, d)
        ok &= close(build(m, d_model=d)(x), F.layer_norm(x, (d,)))
    return ok


def p07(m):
    x = rand(2, 5, 7, grad=True)
    y = torch.randint(0, 7, (2, 5))
    y[0, 2] = -100

    def reference(x):
        keep = y != -100
        z = x.logsumexp(-1)[keep].square().mean()
        return F.cross_entropy(x.flatten(0, 1), y.flatten()) + m.Z * z

    forward, backward = same_grads(lambda t: m.subject.forward(None, t, y), reference, x)
    assert forward
    return backward


def p08(m):
    x, y = rand(3, 8, 11), torch.randint(0, 11, (3, 8))
    y[0, 0], y[1, 1] = 6, -100
    return close(build(m)(x, y), F.cross_entropy(x.flatten(0, 1), y.flatten()))


def p09(m):
    rope = build(m, d_head=8)
    x, at = rand(2, 3, 5, 8), torch.tensor([0, 1, 4, 7, 9])
    z = torch.view_as_complex(x.reshape(2, 3, 5, 4, 2).contiguous())
    angle = at[:, None].double() * 10000.0 ** -(torch.arange(4).double() / 4)
    want = torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
    return close(rope(x, at), want)


def t5_bucket(rel, buckets, far):
    """In words of the paper's code, one distance at a time."""
    half = buckets // 2
    base, n = (half if rel > 0 else 0), abs(rel)
    exact = half // 2
    if n < exact:
        return base + n
    return base + min(half - 1, exact + int(math.log(n / exact) / math.log(far / exact) * (half - exact)))


def p10(m):
    model = build(m)
    table = model.relative_attention_bias.weight
    want = torch.stack([torch.stack([table[t5_bucket(j - i, 16, 32)] for j in range(40)]) for i in range(37)])
    return close(model(37, 40), want.permute(2, 0, 1))


def p11(m):
    ok = True
    want = {3: [2**-4, 2**-8, 2**-2], 4: [2**-2, 2**-4, 2**-6, 2**-8],
            6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
            12: [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]}
    for heads, slopes in want.items():
        bias = build(m, num_heads=heads)(4, 4)
        ok &= torch.allclose(-bias[:, 1, 0].double(), torch.tensor(slopes, dtype=D), rtol=1e-6)
        ok &= len(set(bias[:, 1, 0].tolist())) == heads
    return ok


def p12(m):
    torch.manual_seed(0)
    layer = build(m)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    twin = torch.nn.TransformerEncoderLayer(16, 4, 20, 0.0, activation="gelu", batch_first=True).double()
    a = layer.self_attn
    with torch.no_grad():
        twin.self_attn.in_proj_weight.copy_(torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight]))
        twin.self_attn.in_proj_bias.copy_(torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias]))
        for mine, theirs in ((a.out_proj, twin.self_attn.out_proj), (layer.fc1, twin.linear1), (layer.fc2, twin.linear2),
                             (layer.self_attn_layer_norm, twin.norm1), (layer.final_layer_norm, twin.norm2)):
            theirs.weight.copy_(mine.weight)
            theirs.bias.copy_(mine.bias)
    x = rand(2, 5, 16)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    y = m.forward(layer, x, mask)
    layer.zero_grad()
    y.sum().backward()
    assert (layer.final_layer_norm.weight.grad is not None) == close(y, twin(x, src_key_padding_mask=~mask))
    return close(y, twin(x, src_key_padding_mask=~mask))


def p13(m):
    moe, x = build(m), rand(2, 5, 16)
    want = torch.zeros_like(x)
    for b in range(2):
        for t in range(5):
            p = moe.gate(x[b, t]).softmax(-1)
            best = p.argsort(descending=True)[:2]
            for e in best:
                want[b, t] += p[e] / p[best].sum() * (F.gelu(x[b, t] @ moe.w1[e]) @ moe.w2[e])
    return close(moe(x), want)


def p14(m):
    model, x, memory = build(m), rand(3, 4, 16), rand(3, 6, 16)
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]]).bool()
    out = model(x, memory, mask)
    return all(close(out[b : b + 1], model(x[b : b + 1], memory[b : b + 1, mask[b]])) for b in range(3))


def p15(m):
    model, x = build(m), rand(2, 11, 16)
    q, k, v = (t.view(2, 11, 4, 4).transpose(1, 2) for t in model.c_attn(x).chunk(3, -1))
    y = reference_attention(q, k, v, torch.ones(11, 11).bool().tril())
    return close(model(x), model.c_proj(y.transpose(1, 2).reshape(2, 11, 16)))


def p16(m):
    model, tokens = build(m), torch.randint(0, 11, (2, 14))
    whole = model(tokens)
    moved = tokens.clone()
    moved[:, 0] = (moved[:, 0] + 1) % 11  # two layers of window 4 see six steps back
    assert close(model(moved)[:, 7:], whole[:, 7:]) and not close(model(moved)[:, 6], whole[:, 6])
    assert close(m.cached(model, tokens.split(1, 1)), whole)
    return all(close(m.cached(model, tokens.split(n, 1)), whole) for n in ([5, 1, 1, 7], [3, 3, 3, 5], [6, 2, 6], [14]))


def p17(m):
    model, tokens = build(m), torch.randint(0, 11, (6, 4))
    ok = True
    for k in (1, 3):
        torch.manual_seed(1)
        out, probs = model.sample(tokens, 4, 1.0, k)
        for step in range(4):
            logits = model(out[:, : 4 + step])[:, -1]
            for b in range(6):
                keep = logits[b].argsort(descending=True)[:k]
                want = torch.zeros(11).index_add(0, keep, logits[b, keep].softmax(0))
                ok &= close(probs[b, step], want)
    return ok


def p18(m):
    model = build(m)
    tokens = torch.randint(0, 11, (2, 7))
    mask = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0]]).bool()
    out = model(tokens, mask)
    assert close(out[:1], model(tokens[:1]))
    return close(out[1:, :4], model(tokens[1:, :4]))


def p19(m):
    model = build(m)
    first, second, target = (torch.randint(0, 11, (2, n)) for n in (6, 6, 5))
    ok = True
    for source in (first, second):
        ok &= close(m.cached(model, source, target.split([2, 1, 2], 1)), m.forward(model, source, target))
        ok &= torch.equal(m.generate(model, source, 5, True), m.generate(model, source, 5, False))
    copy.deepcopy(model)
    return ok


def p20(m):
    model = build(m)
    tokens = torch.randint(0, 11, (2, 7))
    mask = torch.tensor([[1] * 7, [1, 1, 0, 0, 0, 0, 0]]).bool()
    out = model(tokens, mask)
    assert close(out[:1], model(tokens[:1]))
    return close(out[1:], model(tokens[1:, :2]))


if __name__ == "__main__":
    for number in range(1, 21):
        verdicts = []
        for which in ("right", "wrong"):
            torch.manual_seed(number)
            verdicts.append(bool(globals()[f"p{number:02d}"](load(number, which))))
        print(f"{number:02d}", "ok" if verdicts == [True, False] else f"BAD right={verdicts[0]} wrong={verdicts[1]}")
