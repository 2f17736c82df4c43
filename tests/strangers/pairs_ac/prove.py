"""Each pair against an independent reference or its defining relation; plain torch, no checks of veriformer."""

import importlib.util
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
HERE = Path(__file__).parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model(m, gain=True, **sizes):
    torch.manual_seed(1)
    c = DrawnConfig(**sizes)
    net = m.subject.build(c).double()
    if gain:
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return net.eval()


def close(a, b, tol=1e-8):
    return a.shape == b.shape and torch.allclose(a, b, atol=tol, rtol=tol)


def ids(*shape, high=11):
    torch.manual_seed(2)
    return torch.randint(4, high, shape)


def cached_is_whole(m, sizes):
    net, x = model(m, num_heads=2), ids(2, 9)
    return close(m.subject.cache(net, list(x.split(sizes, 1))), m.subject.forward(net, x))


def p01(m):
    return cached_is_whole(m, [4, 1, 3, 1])


def p02(m):
    net, x = model(m), ids(2, 6)
    f = m.subject.forward
    return close(f(net, x), f(net, x, torch.ones(2, 6, dtype=torch.bool)))


def p03(m):
    net, x = model(m), ids(2, 6)
    f = m.subject.forward
    return close(f(net, x)[:, :4], f(net, x[:, :4]))


def p04(m):
    net = model(m, num_layers=1)
    a = net.layers[0].attn
    x = torch.randn(2, 5, 8)
    rope = m.precompute_freqs_cis(net.args, 5, x.device)
    mask = torch.ones(1, 5, 5, dtype=torch.bool).tril()
    # independent: heads one by one, by complex rotation, scale from the true width of q
    got, out = a(x, rope, mask), []
    phase = torch.polar(torch.ones(5), torch.arange(5.0))
    turn = lambda t: torch.view_as_real(torch.view_as_complex(t.contiguous()) * phase)
    lat = a.wkv_a(x)
    kpe = turn(lat[..., 8:])
    kv = a.wkv_b(F.rms_norm(lat[..., :8], (8,), a.kv_norm.weight, 1e-6))
    for h in range(2):
        q = a.wq(x)[..., 4 * h : 4 * h + 4]
        q = torch.cat([q[..., :2], turn(q[..., 2:])], -1)
        k = torch.cat([kv[..., 6 * h : 6 * h + 2], kpe], -1)
        s = q @ k.mT / math.sqrt(q.shape[-1])
        s = s + torch.full((5, 5), -math.inf).triu(1)
        out.append(s.softmax(-1) @ kv[..., 6 * h + 2 : 6 * h + 6])
    return close(got, a.wo(torch.cat(out, -1)))


def left_padding(m, **sizes):
    net, x = model(m, **sizes), ids(2, 5)
    f = m.subject.forward
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 5)], 1).bool()
    return close(f(net, torch.cat([ids(2, 3), x], 1), mask)[:, 3:], f(net, x))


def p05(m):
    net, x = model(m, num_layers=2), ids(2, 6)
    f = m.subject.forward
    return left_padding(m, num_layers=2) and close(f(net, x)[:, :4], f(net, x[:, :4]))


def p06(m):
    return cached_is_whole(m, [9]) and cached_is_whole(m, [4, 1, 3, 1])


def p07(m):
    net = model(m, gain=False)
    return net.predictions.decoder.weight is net.embeddings.word_embeddings.weight


def p08(m):
    net, x = model(m, dropout=0.4).train(), ids(2, 6)
    mask = torch.ones(2, 6).bool()
    mask[:, 4:] = False
    y = x.clone()
    y[:, 4:] = (x[:, 4:] - 3) % 11
    outs = []
    for t in (x, y):
        torch.manual_seed(5)
        outs.append(m.subject.forward(net, t, mask)[:, :4])
    return close(*outs)


def p09(m):
    net, x = model(m), ids(2, 7)
    got = m.subject.forward(net, x)
    h = net.norm(net.word(x) + net.position.weight[:7])
    t = torch.arange(7)
    far = (t[:, None] - t).abs() > 2
    for layer in net.layers:
        a = layer.attention
        split = lambda z: z.view(2, 7, 2, 4).transpose(1, 2)
        s = split(a.query(h)) @ split(a.key(h)).mT / 2
        y = s.masked_fill(far, -math.inf).softmax(-1) @ split(a.value(h))
        h = layer.attention_norm(h + a.out(y.transpose(1, 2).reshape(2, 7, 8)))
        h = layer.output_norm(h + layer.output(F.gelu(layer.intermediate(h))))
    return close(got, h)


def p10(m):
    net, x = model(m), ids(3, 6)
    mask = torch.arange(6) < torch.tensor([[6], [3], [2]])
    got = m.subject.forward(net, x, mask)
    return all(close(got[i : i + 1], m.subject.forward(net, x[i : i + 1, : mask[i].sum()])) for i in range(3))


def p11(m):
    net = m.vit.double()
    images = torch.randn(2, 3, 8, 12)
    got = net.patch_embed(images)
    want = []
    for i in range(0, 8, 4):
        for j in range(0, 12, 4):
            want.append(net.patch_embed.proj(images[:, :, i : i + 4, j : j + 4].permute(0, 2, 3, 1).reshape(2, -1)))
    return close(got, torch.stack(want, 1))


def p12(m):
    net = model(m)
    a, b, y = ids(2, 6), ids(2, 6).flip(1), ids(2, 5)
    good = True
    for source in (a, b):
        whole = m.subject.forward(net, source, y)
        good &= close(m.subject.cache(net, source, list(y.split([2, 1, 2], 1))), whole)
    return bool(good)


def p13(m):
    net, x = model(m, num_layers=2), ids(2, 6)
    assert m.subject.forward(net, x, x[:, :4]).shape == (2, 4, 11)
    got, h = net.encoder(x), net.shared(x)
    bias = net.encoder.block[0].self_attention.compute_bias(6, x.device)
    split = lambda z: z.view(2, 6, 2, 4).transpose(1, 2)
    for b in net.encoder.block:
        a, n = b.self_attention, b.self_norm(h)
        w = (split(a.q(n)) @ split(a.k(n)).mT + bias).softmax(-1)
        h = h + a.o((w @ split(a.v(n))).transpose(1, 2).reshape(2, 6, 8))
        h = h + b.wo(F.relu(b.wi(b.ff_norm(h))))
    return close(got, net.encoder.final_layer_norm(h))


def p14(m):
    net = m.subject.build(DrawnConfig(d_model=16, num_heads=2))
    x, pos = torch.randn(2, 2, 5, 8), torch.tensor([0, 1, 2, 7, 9])
    z = torch.view_as_complex(x[..., :4].reshape(2, 2, 5, 2, 2))
    phase = pos.double()[:, None] * torch.tensor([1.0, 10000 ** (-2 / 4)])
    z = torch.view_as_real(z * torch.polar(torch.ones_like(phase), phase)).flatten(-2)
    return close(net(x, pos), torch.cat([z, x[..., 4:]], -1))


def t5_bucket(rel, nb, md):
    """transformers' T5Attention._relative_position_bucket, bidirectional."""
    nb //= 2
    out = (rel > 0).long() * nb
    n = rel.abs()
    me = nb // 2
    large = me + (torch.log(n.clamp(min=1) / me) / math.log(md / me) * (nb - me)).long()
    return out + torch.where(n < me, n, large.clamp(max=nb - 1))


def p15(m):
    net = model(m)
    rel = torch.arange(9)[None] - torch.arange(6)[:, None]
    return close(net(6, 9), net.table[t5_bucket(rel, 8, 20)].permute(2, 0, 1))


def p16(m):
    logits, labels = torch.randn(2, 5, 7), ids(2, 5, high=7)
    labels[0, 3:] = -100
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    return close(m.subject.forward(None, logits, labels), want)


def p17(m):
    net, x = model(m), torch.randn(2, 3, 8, requires_grad=True)
    g = torch.randn(2, 3, 8)
    got = torch.autograd.grad(net(x), (x, net.weight), g)
    want = torch.autograd.grad(F.rms_norm(x, (8,), net.weight, 1e-6), (x, net.weight), g)
    return all(map(close, got, want))


def p18(m):
    mask = m.subject.build(DrawnConfig(vocab_size=50))
    torch.manual_seed(0)
    x = torch.randint(0, 50, (40, 500))
    y, labels = mask(x, 3)
    hidden = labels != -100
    good = bool((labels[hidden] == x[hidden]).all() and (y[~hidden] == x[~hidden]).all())
    share = (hidden & (x > 3)).sum() / (x > 3).sum()
    to_mask = (y[hidden] == 3).sum() / hidden.sum()
    good &= abs(share - 0.15) < 0.02 and abs(to_mask - 0.8) < 0.05
    return bool(good and not (hidden & (x <= 3)).any())


def p19(m):
    good = True
    for T, S in ((5, 5), (20, 20), (7, 30), (20, 9), (1, 17)):
        q, k, v = torch.randn(2, 4, T, 6), torch.randn(2, 2, S, 6), torch.randn(2, 2, S, 5)
        for causal in (False, True):
            allowed = torch.rand(2, 1, T, S) > 0.2
            full = allowed & (torch.ones(T, S).tril(S - T).bool() if causal else True)
            s = q @ k.repeat_interleave(2, 1).mT / math.sqrt(6)
            w = s.masked_fill(~full, -math.inf).softmax(-1).nan_to_num(0.0)
            good &= close(m.subject.forward(None, q, k, v, allowed, causal), w @ v.repeat_interleave(2, 1))
    return bool(good)


def p20(m):
    net, x = model(m), torch.randn(2, 5, 8)
    w = m.subject.router(net, x)
    want = sum(w[..., i, None] * e(x) for i, e in enumerate(net.experts)) + net.shared_expert(x)
    return close(net(x), want)


if __name__ == "__main__":
    for right in sorted(HERE.glob("*_right.py")):
        wrong = right.with_name(right.name.replace("_right", "_wrong"))
        number = right.name[:2]
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        check = globals()["p" + number]
        r, w = load(right), load(wrong)
        same = repr(r.subject.declares) == repr(w.subject.declares) and wrong.read_text().startswith("WHAT = ")
        a, b = check(r), check(w)
        print(number, "ok" if a and not b and same else f"NOT OK right={a} wrong={b} same={same}", flush=True)
