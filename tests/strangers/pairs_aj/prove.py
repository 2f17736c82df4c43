"""For every pair: the right file agrees with an independent reference or defining relation, the wrong one does not."""

import importlib.util
import itertools
import math
import random
import re
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
HERE = Path(__file__).parent


def load(stem):
    (path,) = HERE.glob(f"{stem}.py")
    spec = importlib.util.spec_from_file_location("case_" + path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pair(number):
    return load(f"{number}_*_wrong"), load(f"{number}_*_right")


def far(a, b, by=1e-5):
    return not torch.allclose(a.double(), b.double(), atol=by, rtol=by)


def attend(q, k, v, visible):
    """One query, one head at a time; grouped heads; zeros where nothing is visible."""
    B, H, T, K = q.shape
    out = q.new_zeros(B, H, T, v.shape[-1])
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        g = h // (H // k.shape[1])
        seen = visible[b, t].nonzero().flatten()
        if len(seen):
            w = torch.softmax(k[b, g, seen] @ q[b, h, t] / math.sqrt(K), 0)
            out[b, h, t] = w @ v[b, g, seen]
    return out


def p01(m):
    ok = True
    for n in (5, 16, 19, 40, 64):
        for shape, dim in (((3, n), -1), ((n, 4), 0)):
            x = torch.randn(8, *shape, dtype=torch.float64) * 3
            d = dim if dim < 0 else dim + 1
            ok &= not far(m.streaming_softmax(x, d), x.softmax(d))
    return ok


def p02(m):
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    out = m.grouped_attention(None, q, k, v, causal=True)
    ref = attend(q, k, v, seen.expand(2, 5, 5))
    assert not far(out, ref)
    g = torch.randn_like(out)
    return all(
        not far(a, b)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), g), torch.autograd.grad(ref, (q, k, v), g))
    )


def p03(m):
    ok = True
    for T, S in ((6, 20), (7, 70), (40, 50)):
        q, k, v = torch.randn(2, 4, T, 4).double(), torch.randn(2, 2, S, 4).double(), torch.randn(2, 2, S, 3).double()
        mask = torch.rand(2, 1, T, S) > 0.3
        mask[0, 0, 1] = False
        seen = mask[:, 0] & torch.ones(T, S, dtype=torch.bool).tril(S - T)
        ok &= not far(m.forward(None, q, k, v, mask, True), attend(q, k, v, seen))
    return ok


def p04(m):
    net = m.LocalSelfAttention(8, 2).double()
    ok = True
    for T in (1, 4, 7, 9):
        x = torch.randn(2, T, 8).double()
        pad = torch.ones(2, T, dtype=torch.bool)
        pad[1, T // 2 + 1 :] = False
        q, k, v = (t.view(2, T, 2, 4).transpose(1, 2) for t in net.to_qkv(x).chunk(3, -1))
        i, j = torch.arange(T)[:, None], torch.arange(T)[None]
        seen = ((j <= i) & (j > i - m.WINDOW))[None] & pad[:, None]
        ref = net.to_out(attend(q, k, v, seen).transpose(1, 2).reshape(2, T, 8))
        ok &= not far(net(x, pad)[pad], ref[pad])
    return ok


def p05(m):
    net = m.EncoderDecoderAttention(8, 2).double().eval()
    x, mem = torch.randn(3, 4, 8).double(), torch.randn(3, 6, 8).double()
    mask = torch.arange(6)[None] < torch.tensor([6, 3, 4])[:, None]
    ref = nn.MultiheadAttention(8, 2, batch_first=True).double()
    ref.in_proj_weight.data = torch.cat([net.q_proj.weight, net.k_proj.weight, net.v_proj.weight]).detach()
    ref.in_proj_bias.data = torch.cat([net.q_proj.bias, net.k_proj.bias, net.v_proj.bias]).detach()
    ref.out_proj.load_state_dict(net.out_proj.state_dict())
    return not far(m.run(net, x, mem, mask), ref(x, mem, mem, key_padding_mask=~mask)[0])


def p06(m):
    ok = True
    for dim, lengths in ((8, (10, 40)), (7, (33,)), (6, (20, 5, 50))):
        net = m.GrowingSinusoids(dim)
        for length in lengths:
            ref = torch.tensor(
                [
                    [(math.cos if c % 2 else math.sin)(p / 10000 ** ((c - c % 2) / dim)) for c in range(dim)]
                    for p in range(length)
                ]
            )
            ok &= not far(net(length), ref)
    return ok


def p07(m):
    x, pos = torch.randn(2, 2, 5, 6).double(), torch.tensor([0, 1, 3, 7, 20])
    freq = 10000 ** (-torch.arange(3).double() / 3)
    z = torch.view_as_complex(x.reshape(2, 2, 5, 3, 2)) * torch.exp(1j * pos.double()[:, None] * freq)
    return not far(m.Rotary()(x, pos), torch.view_as_real(z).reshape(x.shape))


def p08(m):
    net = m.RelativePositionBias(3)

    def bucket(d, n=8, far_=20):  # one side, by the paper's rule
        return d if d < n // 2 else min(n - 1, n // 2 + int(math.log(d / (n // 2)) / math.log(far_ / (n // 2)) * (n - n // 2)))

    T, S = 12, 30
    ref = torch.stack(
        [
            torch.stack([net.relative_attention_bias.weight[bucket(abs(s - t)) + (8 if s > t else 0)] for s in range(S)])
            for t in range(T)
        ]
    ).permute(2, 0, 1)
    return not far(net(T, S), ref)


def p09(m):
    ok = True
    for width in (3, 6, 8, 13):
        net, ref = m.MergedLayerNorm(width).double(), nn.LayerNorm(width).double()
        nn.init.normal_(net.weight), nn.init.normal_(net.bias)
        ref.load_state_dict(net.state_dict())
        x = torch.randn(2, 5, width).double() * 2 + 1
        ok &= not far(net(x), ref(x))
    return ok


def p10(m):
    net = m.ParallelMLP(6, 10).double()
    x = torch.randn(2, 3, 6).double().mul(2).requires_grad_()
    out = net(x)
    a, b = net.dense_h_to_4h, net.dense_4h_to_h
    ref = b(F.gelu(a(x), approximate="tanh"))
    assert not far(out, ref)
    inputs = (x, *net.parameters())
    g = torch.randn_like(out)
    return all(not far(s, t) for s, t in zip(torch.autograd.grad(out, inputs, g), torch.autograd.grad(ref, inputs, g)))


def p11(m):
    net = m.Experts(6, 8).double()
    x = torch.randn(2, 5, 6).double()
    ref = torch.zeros_like(x)
    for b, t in itertools.product(range(2), range(5)):
        probs = (net.gate.weight @ x[b, t]).softmax(0)
        best = probs.argsort(descending=True)[:2]
        for e in best:
            h = net.w_in[e] @ x[b, t]
            ref[b, t] += probs[e] / probs[best].sum() * (net.w_out[e] @ (F.silu(h[:8]) * h[8:]))
    return not far(net(x), ref)


def p12(m):
    # x + droppath(f(x)): in training a sample has each branch whole or not at all. The attention branch is silenced.
    torch.manual_seed(1)
    net = m.Block(8, 2, 12, 0.4)
    nn.init.zeros_(net.attn.proj.weight), nn.init.zeros_(net.attn.proj.bias)
    x = torch.randn(400, 5, 8)
    net.eval()
    branch = net(x) - x
    net.train()
    got = net(x) - x
    kept = (got - branch / 0.6).abs().amax(-1) < 1e-4
    gone = got.abs().amax(-1) < 1e-6
    assert (kept | gone).all() and abs(gone.float().mean() - 0.4) < 0.1
    return bool((kept.all(1) | gone.all(1)).all())


def p13(m):
    # eval is the textbook's; in training a changed future token must not reach the past (the same random numbers).
    torch.manual_seed(2)
    net = m.Block(8, 2, 12, 0.5)
    x = torch.randn(2, 6, 8)
    y = x.clone()
    y[:, -1] = torch.randn(2, 8)
    net.eval()
    ref = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True, norm_first=True).eval()
    with torch.no_grad():
        ref.self_attn.in_proj_weight.copy_(net.attn.c_attn.weight), ref.self_attn.in_proj_bias.copy_(net.attn.c_attn.bias)
        ref.self_attn.out_proj.load_state_dict(net.attn.c_proj.state_dict())
        ref.linear1.load_state_dict(net.mlp[0].state_dict()), ref.linear2.load_state_dict(net.mlp[2].state_dict())
        assert not far(net(x), ref(x, src_mask=~torch.ones(6, 6, dtype=torch.bool).tril()))
    net.train()
    outs = []
    for inputs in (x, y):
        torch.manual_seed(3)
        outs.append(net(inputs)[:, :-1])
    return not far(*outs)


def p14(m):
    logits = torch.randn(2, 6, 9).double() * 3
    labels = torch.randint(0, 9, (2, 6))
    labels[0, :2] = -100
    keep = labels != -100
    z = torch.logsumexp(logits, -1)[keep]
    ref = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 1e-3 * (z**2).mean()
    return abs(m.cross_entropy_with_z(logits, labels) - ref).item() < 1e-9


def p15(m):
    collate = m.MLMCollator(64)
    tokens = torch.randint(0, 64, (200, 200))
    inputs, labels = collate(tokens, 5)
    counted = labels != -100
    special = tokens < 4
    assert not (counted & special).any() and (labels[counted] == tokens[counted]).all()
    assert (inputs[~counted] == tokens[~counted]).all()
    share = counted.sum() / (~special).sum()
    masked = (inputs[counted] == 3).float().mean()
    same = (inputs[counted] == tokens[counted]).float().mean()
    assert abs(share - 0.15) < 0.01 and (inputs[counted] >= 3).all()
    return abs(masked - 0.8) < 0.03 and abs(same - 0.1) < 0.03


def p16(m):
    rate = m.subject.build(None)

    def ref(step, peak=6e-4, low=6e-5, warm=20, total=200):
        if step <= warm:
            return peak * step / warm
        step = min(step, total)
        return low + (peak - low) * (1 + math.cos(math.pi * (step - warm) / (total - warm))) / 2

    return all(abs(rate(s) - ref(s)) < 1e-9 for s in range(260))


def p17(m):
    model = m.GPT(11, 32, 8, 20, 2)
    groups = m.parameter_groups(model)
    decays = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert sum(len(g["params"]) for g in groups) == len(decays) == len(list(model.parameters()))
    return all((decays[id(p)] > 0) == (p.ndim == 2) for p in model.parameters())


def p18(m):
    def naive(texts, size):
        words = [w for text in texts for w in m.split_words(text)]
        merges, pieces = [], set(m.LETTER.values())
        while len(pieces) < size:
            counts = Counter(p for w in words for p in zip(w, w[1:]))
            if not counts:
                break
            best = min(counts, key=lambda p: (-counts[p], p))
            merges.append(best)
            pieces.add("".join(best))
            words = [m.merge(w, best) for w in words]
        return merges

    model = m.train(m.CORPUS, 300)
    for text in ("the newest tokens  é\n日本", *m.CORPUS):
        assert model.decode(model.encode(text)) == text
    return model.merges == naive(m.CORPUS, 300)


def p19(m):
    model = m.Unigram(m.COUNTS)

    def value(pieces):
        return sum(model.score.get(p, model.penalty) for p in pieces)

    def cuts(word):
        for k in range(2 ** (len(word) - 1)):
            out, start = [], 0
            for i in range(1, len(word)):
                if k >> (i - 1) & 1:
                    out.append(word[start:i])
                    start = i
            out.append(word[start:])
            if all(p in model.score or len(p) == 1 for p in out):
                yield out

    text = "the attention of a model in training and attentions less zoo gradient"
    return all(
        abs(value(model.segment(w)) - max(map(value, cuts(w)))) < 1e-9 for w in model.words(text)
    )


def p20(m):
    net = m.RelMultiHeadAttention(8, 2).double()
    T, D, H, K = 5, 8, 2, 4
    x = torch.randn(2, T, D).double()
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[1, 3:] = False
    q, k, v = (n(x).view(2, T, H, K) for n in (net.q_net, net.k_net, net.v_net))
    score = torch.full((2, H, T, T), -math.inf).double()
    for b, h, i, j in itertools.product(range(2), range(H), range(T), range(T)):
        if mask[b, j]:
            angle = (i - j) / 10000 ** (torch.arange(0, D, 2).double() / D)
            r = net.r_net(torch.cat([angle.sin(), angle.cos()])).view(H, K)[h]
            score[b, h, i, j] = ((q[b, i, h] + net.r_w_bias[h]) @ k[b, j, h] + (q[b, i, h] + net.r_r_bias[h]) @ r) / K**0.5
    ref = net.o_net(torch.einsum("bhij,bjhk->bihk", score.softmax(-1), v).reshape(2, T, D))
    return not far(net(x, mask), ref)


if __name__ == "__main__":
    for number in range(1, 21):
        torch.manual_seed(number)
        random.seed(number)
        name = f"{number:02d}"
        wrong, right = pair(name)
        line = int(re.search(r"; line (\d+): `", wrong.WHAT).group(1))
        source = Path(wrong.__file__).read_text().splitlines()[line - 1].strip()
        assert source in wrong.WHAT, (name, source)
        prove = globals()["p" + name]
        torch.manual_seed(number)
        good = prove(right)
        torch.manual_seed(number)
        bad = prove(wrong)
        print(name, "ok" if good and not bad else f"NOT OK (right {good}, wrong {bad})")
