"""Each wrong file is wrong and each right one right, by independent references in plain torch."""

import importlib.util
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
torch.set_num_threads(1)


def load(name):
    spec = importlib.util.spec_from_file_location(f"blind_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(a, b, tol=1e-5):
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), atol=tol, rtol=tol)


def built(s, seed=0, **sizes):
    torch.manual_seed(seed)
    c = dict(d_model=8, num_heads=2, num_key_value_heads=2, num_layers=2, d_ff=20, vocab_size=11, max_len=32, dropout=0.0)
    c.update(sizes)
    return s.build(SimpleNamespace(**c, d_head=c["d_model"] // c["num_heads"]))


def softmax_attention(q, k, v, allowed):
    """One query at a time, in float64 loops."""
    B, H, T, K = q.shape
    rep = H // k.shape[1]
    out = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = [s for s in range(k.shape[2]) if allowed[b, t, s]]
                if not keys:
                    out.append(torch.zeros(v.shape[-1], dtype=v.dtype))
                    continue
                w = torch.softmax(k[b, h // rep, keys] @ q[b, h, t] / math.sqrt(K), 0)
                out.append(w @ v[b, h // rep, keys])
    return torch.stack(out).view(B, H, T, -1)


def p01(m):
    torch.manual_seed(0)
    good = True
    for T, S, causal in ((3, 40, True), (20, 37, True), (37, 37, True), (40, 5, True), (18, 35, False)):
        q, k, v = torch.randn(2, 4, T, 8), torch.randn(2, 2, S, 8), torch.randn(2, 2, S, 6)
        mask = torch.rand(2, 1, T, S) > 0.3
        allowed = mask[:, 0].clone()
        if causal:
            allowed &= torch.ones(T, S, dtype=torch.bool).tril(S - T)
        got = m.subject.forward(None, q, k, v, attention_mask=mask, causal=causal)
        good &= close(got, softmax_attention(q, k, v, allowed))
    return good


def p02(m):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 5, 4, dtype=torch.float64, requires_grad=True) for h in (6, 2, 2))
    allowed = torch.ones(2, 5, 5, dtype=torch.bool).tril()
    target = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    got, want = m.subject.forward(None, q, k, v, causal=True), softmax_attention(q, k, v, allowed)
    a = torch.autograd.grad((got * target).sum(), (q, k, v))
    b = torch.autograd.grad((want * target).sum(), (q, k, v))
    assert close(got, want)
    return all(close(x, y) for x, y in zip(a, b))


def p03(m):
    model = built(m.subject).eval()
    x = torch.randn(3, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]).bool()
    got = m.subject.forward(model, x, attention_mask=mask)
    heads = [p(x).view(3, 5, 2, 4).transpose(1, 2) for p in (model.q_proj, model.k_proj, model.v_proj)]
    want = softmax_attention(*heads, mask[:, None].expand(3, 5, 5)).transpose(1, 2).reshape(3, 5, 8)
    return close(got, model.out_proj(want))


def p04(m):
    model = built(m.subject, dropout=0.3).eval()
    x = torch.randn(2, 6, 8)
    heads = [t.view(2, 6, 2, 4).transpose(1, 2) for t in (x @ model.c_attn.weight.T).split(8, dim=2)]
    want = softmax_attention(*heads, torch.ones(2, 6, 6).tril().bool()).transpose(1, 2).reshape(2, 6, 8)
    want = want @ model.c_proj.weight.T
    in_eval = all(close(m.subject.forward(model, x), want) for _ in range(3))
    model.train()
    assert not torch.equal(model(x), model(x))
    return in_eval


def p05(m):
    model = built(m.subject)
    x = torch.randn(2, 7, 8)
    q, k, v = (t.view(2, 7, 2, 4).transpose(1, 2) for t in (x @ model.to_qkv.weight.T).chunk(3, -1))

    def turn(z):  # as complex numbers: channel i with channel i + 2
        c = torch.complex(z[..., :2], z[..., 2:])
        angle = torch.arange(7.0)[:, None] * torch.tensor([1.0, 10000**-0.5])
        c = c * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((c.real, c.imag), -1)

    want = softmax_attention(turn(q), turn(k), v, torch.ones(2, 7, 7).tril().bool())
    return close(m.subject.forward(model, x), want.transpose(1, 2).reshape(2, 7, 8) @ model.to_out.weight.T)


def p06(m):
    model = built(m.subject)
    good = True
    for seed in range(3):
        x, memory = torch.randn(2, 9, 8), torch.randn(2, 5, 8)
        mask = torch.rand(2, 5) > 0.3
        mask[:, 0] = True
        q = model.query(x).view(2, 9, 2, 4).transpose(1, 2)
        k, v = (p(memory).view(2, 5, 2, 4).transpose(1, 2) for p in (model.key, model.value))
        want = softmax_attention(q, k, v, mask[:, None].expand(2, 9, 5)).transpose(1, 2).reshape(2, 9, 8)
        want = model.out(want)
        assert close(m.subject.forward(model, x, memory, memory_mask=mask), want)
        with torch.no_grad():
            good &= close(m.subject.forward(model, x, memory, memory_mask=mask), want)
    return good


def p07(m):
    good = True
    for d in (8, 7):
        got = m.subject.forward(built(m.subject, d_model=d, num_heads=1, num_key_value_heads=1), 40)
        want = torch.empty(40, d)
        for t in range(40):
            for i in range(d):
                angle = t / 10000 ** ((i - i % 2) / d)
                want[t, i] = math.cos(angle) if i % 2 else math.sin(angle)
        good &= close(got, want)
    return good


def p08(m):
    model = built(m.subject, d_model=16)
    x, positions = torch.randn(2, 2, 6, 8, requires_grad=True), torch.tensor([0, 1, 2, 5, 9, 30])
    angle = positions[:, None] * 10000 ** -(torch.arange(4) / 4)
    want = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)
    got = m.subject.forward(model, x, positions)
    got.sum().backward()
    return close(got, torch.cat((want.real, want.imag), -1)) and close(got.norm(dim=-1), x.norm(dim=-1))


def p09(m):
    model = built(m.subject)
    table = model.relative_attention_bias.weight

    def bucket(d):  # d = key - query; 8 buckets, 4 for each direction: 0, 1 exact, 2.. logarithmic up to 16
        n = abs(d)
        b = n if n < 2 else min(3, 2 + math.floor(math.log(n / 2) / math.log(16 / 2) * 2))
        return b + (4 if d > 0 else 0)

    want = torch.stack([torch.stack([table[bucket(s - t)] for s in range(25)]) for t in range(20)]).permute(2, 0, 1)
    return close(m.subject.forward(model, 20, 25), want)


def p10(m):
    known = {  # of the paper's code, written out
        2: [2**-4, 2**-8],
        3: [2**-4, 2**-8, 2**-2],
        4: [2**-2, 2**-4, 2**-6, 2**-8],
        6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
        12: [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
    }
    good = True
    for heads, slopes in known.items():
        got = m.subject.forward(built(m.subject, d_model=12, num_heads=heads, num_key_value_heads=heads), 6, 6)
        want = torch.tensor([[[-s * abs(i - j) for j in range(6)] for i in range(6)] for s in slopes])
        good &= close(got, want)
    return good


def p11(m):
    model = built(m.subject).double()
    with torch.no_grad():
        model.weight.normal_()
        model.bias.normal_()
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    target = torch.randn_like(x)
    got, want = m.subject.forward(model, x), F.layer_norm(x, (8,), model.weight, model.bias, 1e-5)
    assert close(got, want)
    leaves = (x, model.weight, model.bias)
    a = torch.autograd.grad((got * target).sum(), leaves)
    b = torch.autograd.grad((want * target).sum(), leaves)
    return all(close(p, q) for p, q in zip(a, b))


def p12(m):
    model = built(m.subject).eval()
    nn.init.normal_(model.c_fc.weight)
    nn.init.normal_(model.c_proj.weight)
    x = torch.randn(2, 5, 8)
    h = F.gelu(x @ model.c_fc.weight + model.c_fc.bias, approximate="tanh")
    return close(m.subject.forward(model, x), h @ model.c_proj.weight + model.c_proj.bias)


def p13(m):
    model = built(m.subject)
    x = torch.randn(3, 7, 8)
    want = torch.zeros_like(x)
    weights = m.subject.router(model, x)
    for b in range(3):
        for t in range(7):
            p = torch.softmax(model.gate.weight @ x[b, t], 0)
            chosen = p.argsort(descending=True)[:2]
            for e in chosen:
                share = p[e] / p[chosen].sum()
                assert close(weights[b, t, e], share)
                want[b, t] += share * (torch.relu(x[b, t] @ model.w_in[e]) @ model.w_out[e])
    return close(m.subject.forward(model, x), want)


def p14(m):
    model = built(m.subject, dropout=0.1).eval()
    x = torch.randn(2, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()
    layers = []
    for ours in model.layers:  # torch's own pre-norm layer with the same weights
        ref = nn.TransformerEncoderLayer(8, 2, 20, dropout=0.1, norm_first=True, batch_first=True).eval()
        ref.self_attn.in_proj_weight.data = ours.self_attn.in_proj.weight.data
        ref.self_attn.in_proj_bias.data = ours.self_attn.in_proj.bias.data
        ref.self_attn.out_proj.load_state_dict(ours.self_attn.out_proj.state_dict())
        ref.linear1.load_state_dict(ours.fc1.state_dict())
        ref.linear2.load_state_dict(ours.fc2.state_dict())
        for theirs, norm in ((ref.norm1, ours.self_attn_layer_norm), (ref.norm2, ours.final_layer_norm)):
            norm.weight.data.normal_(1.0, 0.5)
            norm.bias.data.normal_()
            theirs.load_state_dict(norm.state_dict())
        layers.append(ref)
    want = x
    for ref in layers:
        want = ref(want, src_key_padding_mask=~mask)
    return close(m.subject.forward(model, x, attention_mask=mask), want)


def p15(m):
    model = built(m.subject)
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    full = close(model(logits, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1))
    labels[1, 2:] = -100
    want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
    assert full
    return close(m.subject.forward(model, logits, labels), want)


def p16(m):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 11), torch.randint(11, (3, 5))
    labels[1, 3:] = -100
    terms = [
        -torch.log_softmax(logits[b, t], 0)[labels[b, t + 1]]
        for b in range(3)
        for t in range(4)
        if labels[b, t + 1] != -100
    ]
    return close(m.subject.forward(None, logits, labels), sum(terms) / len(terms))


def p17(m):
    V = 1000
    model = built(m.subject, vocab_size=V)
    torch.manual_seed(0)
    tokens = torch.randint(0, V, (400, 500))
    tokens[:, 0], tokens[:, -1] = 1, 2
    inputs, labels = m.subject.forward(model, tokens, 7)
    chosen = labels != -100
    assert torch.equal(labels[chosen], tokens[chosen]) and torch.equal(inputs[~chosen], tokens[~chosen])
    assert not (chosen & (tokens < 4)).any()
    assert abs(chosen[tokens >= 4].float().mean() - 0.15) < 0.005
    masked = (inputs == 3)[chosen].float().mean()
    same = (inputs == tokens)[chosen].float().mean()
    return abs(masked - 0.8) < 0.01 and abs(same - 0.1) < 0.01 and abs(1 - masked - same - 0.1) < 0.01


def p18(m):
    good = True
    for step in range(0, 260):
        if step < 20:
            want = 6e-4 * step / 20
        elif step >= 200:
            want = 6e-5
        else:
            want = 6e-5 + 5.4e-4 * math.cos(math.pi / 2 * (step - 20) / 180) ** 2
        good &= abs(m.subject.forward(None, step) - want) < 1e-9
    return good


def p19(m):
    model = built(m.subject)
    groups = m.subject.forward(model)
    listed = [id(p) for g in groups for p in g["params"]]
    assert len(listed) == len(set(listed))
    complete = set(listed) == {id(p) for p in model.parameters()}
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    F.cross_entropy(model(torch.randint(11, (4, 6))), torch.arange(4)).backward()
    assert model.logit_scale.grad is not None and model.logit_scale.grad != 0
    optimizer.step()
    moved = all(not torch.equal(p, q) for p, q in zip(model.parameters(), before))
    decayed = {id(p) for g in groups if g["weight_decay"] for p in g["params"]}
    assert not any(id(p) in decayed for n, p in model.named_parameters() if "norm" in n or n.endswith("bias"))
    return complete and moved


def p20(m):
    """Counted anew, over the whole corpus, for each merge; the same rule for ties."""

    def naive(texts, merges_wanted):
        words = [list(w.encode().decode("latin-1")) for t in texts for w in re.findall(r" ?\w+| ?[^\w\s]+|\s+", t)]
        merges = []
        while len(merges) < merges_wanted:
            counts = Counter(pair for w in words for pair in zip(w, w[1:]))
            if not counts:
                break
            best = max(counts, key=lambda p: (counts[p], p))
            merges.append(best)
            for w in words:
                i = 0
                while i < len(w) - 1:
                    if (w[i], w[i + 1]) == best:
                        w[i : i + 2] = ["".join(best)]
                    i += 1
        return merges

    good = True
    for texts in (m.CORPUS, ["aaabdaaabac aaab", "the then them the the them these", "banana bandana ban banana"]):
        tokenizer = m.subject.train(texts, 256 + 25)
        for text in texts + ["héllo  wörld\n\t the ☃!"]:
            assert m.subject.decode(tokenizer, m.subject.forward(tokenizer, text)) == text
        merges = m.subject.merges(tokenizer)
        assert merges
        good &= merges == naive(texts, len(merges))
    return good


failed = False
for right in sorted(HERE.glob("*_right.py")):
    number = right.name[:2]
    name = right.name.removesuffix("_right.py")
    verdict = globals()[f"p{number}"]
    w, r = load(f"{name}_wrong"), load(f"{name}_right")
    assert isinstance(w.WHAT, str) and right.with_name(f"{name}_wrong.py").read_text().startswith("WHAT = ")
    assert w.subject.declares == r.subject.declares and w.subject.kind == r.subject.kind
    ok = bool(verdict(r)) and not bool(verdict(w))
    failed |= not ok
    print(number, "ok" if ok else f"NOT ok (right holds: {bool(verdict(r))}, wrong holds: {bool(verdict(w))})", name)
sys.exit(failed)
