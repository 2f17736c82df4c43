"""For every pair, in plain torch: right agrees with a naive computation or an identity, wrong does not."""

import copy
import importlib.util
import math
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from veriformer.properties import DrawnConfig

HERE = Path(__file__).parent
C = DrawnConfig()
PROOFS = {}


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def build(module, config=C, noisy=True):
    """The same weights for right and wrong, in float64, gains and biases drawn too."""
    torch.manual_seed(0)
    model = module.subject.build(config)
    if isinstance(model, torch.nn.Module):
        model = model.double().eval()
        if noisy:
            generator = torch.Generator().manual_seed(1)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def tokens(*shape, seed=0, high=C.vocab_size):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def proof(number):
    return lambda function: PROOFS.setdefault(number, function)


def gap(a, b):
    return float((a - b).detach().abs().max())


@proof("01")
def retention(m):
    """Sum over s <= t of gamma^(t-s) (q_t . k_s) v_s, by loops."""
    layer = build(m).blocks[0].retention
    x = normal(2, 11, C.d_model)
    q, k, v = layer.split(layer.q(x)), layer.split(layer.k(x)) * layer.width**-0.5, layer.split(layer.v(x))
    o = torch.zeros_like(v)
    for h in range(layer.heads):
        g = 1 - 2.0 ** (-2 - h)
        for t in range(11):
            for s in range(t + 1):
                o[:, h, t] += g ** (t - s) * (q[:, h, t] * k[:, h, s]).sum(-1, keepdim=True) * v[:, h, s]
    o = layer.group_norm(o).transpose(1, 2).flatten(2)
    return gap(layer(x)[0], layer.out(o * F.silu(layer.gate(x))))


@proof("02")
def hybrid(m):
    """Single steps give what the whole gives; the whole's mixer is a loop over definitions."""
    model, ids = build(m), tokens(2, 9)
    mixer, x, K = model.layers[0].mix, normal(2, 7, C.d_model), m.KERNEL
    u, gate = mixer.into(x).chunk(2, -1)
    conv = torch.zeros_like(u)
    for t in range(7):
        for j in range(K):
            if t - j >= 0:
                conv[:, t] += mixer.kernel[:, 0, K - 1 - j] * u[:, t - j]
    u = F.silu(conv)
    delta, (b, c) = F.softplus(mixer.delta(u)), mixer.select(u).chunk(2, -1)
    y = torch.zeros_like(u)
    for t in range(7):
        for s in range(t + 1):
            passed = torch.exp(-delta[:, s + 1 : t + 1].sum(1)[..., None] * mixer.log_decay.exp())
            y[:, t] += (passed * (delta[:, s] * u[:, s])[..., None] * b[:, s, None] * c[:, t, None]).sum(-1)
    assert gap(mixer(x, None)[0], mixer.out((y + mixer.skip * u) * F.silu(gate))) < 1e-9
    att, x = model.layers[1].mix, normal(2, 8, C.d_model)  # the window, naively
    q, k, v = (z.unflatten(-1, (C.num_heads, -1)) for z in att.qkv(x).chunk(3, -1))
    o = torch.zeros_like(q)
    for t in range(8):
        near = slice(max(0, t - m.WINDOW + 1), t + 1)
        w = (torch.einsum("bhd,bshd->bhs", q[:, t], k[:, near]) / 2).softmax(-1)
        o[:, t] = torch.einsum("bhs,bshd->bhd", w, v[:, near])
    assert gap(att(x, None)[0], att.out(o.flatten(2))) < 1e-9
    return gap(m.stream(model, list(ids.split(1, 1))), model(ids)[0])


@proof("03")
def multi_token(m):
    """Every sample gives in a batch what it gives alone; and the module is recomputed with an explicit shift."""
    model, ids = build(m), tokens(3, 6)
    whole = model(ids)
    rows = []
    for row in ids:
        embedded = model.wte(row[None]) + model.wpe.weight[:6]
        x = embedded
        for block in model.trunk:
            x = block(x)
        p = model.predictor
        joined = []
        for t in range(6):
            before = x[:, t - 1] if t else torch.zeros_like(x[:, 0])
            joined.append(p.join(torch.cat([p.norm_state(before), p.norm_token(embedded[:, t])], -1)))
        ahead = p.block(torch.stack(joined, 1))
        rows.append(torch.cat([model.head(model.ln_f(x)), model.head(model.ln_p(ahead))], -1))
    assert gap(model(ids[:1]), rows[0]) < 1e-9  # both are right for one sample alone
    changed = ids.clone()
    changed[0] = (changed[0] + 1) % C.vocab_size
    return max(gap(whole, torch.cat(rows)), gap(model(changed)[1:], whole[1:]))


@proof("04")
def latent(m):
    """The absorbed form gives what the expanded one gives, and the expanded one is the definition."""
    model, ids = build(m), tokens(2, 8)
    a, x = model.blocks[0].attention, normal(2, 5, C.d_model)
    q = a.q(x).view(2, 5, a.heads, a.width)
    c, kr = a.down(x).split([a.rank, a.rope], -1)
    c = a.norm(c)
    y = torch.zeros(2, 5, a.heads, a.width, dtype=x.dtype)

    def turn(z, t):  # complex multiplication
        half = a.rope // 2
        angle = t * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        w = torch.complex(z[..., :half], z[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([w.real, w.imag], -1)

    for h in range(a.heads):
        for t in range(5):
            s = torch.stack([
                ((q[:, t, h, : a.nope] * (c[:, i] @ a.up_k[h].T)).sum(-1) + (turn(q[:, t, h, a.nope :], t) * turn(kr[:, i], i)).sum(-1)) / math.sqrt(a.width)
                for i in range(t + 1)
            ], -1).softmax(-1)
            y[:, t, h] = sum(s[:, i, None] * (c[:, i] @ a.up_v[h].T) for i in range(t + 1))
    assert gap(a(x)[0], a.out(y.flatten(2))) < 1e-9
    return gap(m.cached(model, [ids[:, :3], ids[:, 3:4], ids[:, 4:]]), model(ids)[0])


@proof("05")
def product_keys(m):
    """All n^2 keys by brute force, with autograd through them: values and gradients of the keys and the query map."""
    model = build(m)
    a, x = model.address, normal(2, 5, C.d_model)
    q = a.query(x).unflatten(-1, (a.heads, 2, a.half))
    s = torch.einsum("bthd,hnd->bthn", q[..., 0, :], a.keys[0])[..., :, None] + torch.einsum("bthd,hnd->bthn", q[..., 1, :], a.keys[1])[..., None, :]
    s = s.flatten(-2)
    best = s.topk(a.k, -1)
    sparse = torch.full_like(s, -torch.inf).scatter(-1, best.indices, best.values).softmax(-1)
    naive = model.out(F.silu(model.gate(x)) * (sparse @ model.values.weight).sum(2))
    y = model(x)
    assert gap(y, naive) < 1e-9  # the forward is the same in both
    want = torch.autograd.grad(naive.square().sum(), [a.keys, a.query.weight])
    got = torch.autograd.grad(y.square().sum(), [a.keys, a.query.weight], allow_unused=True)
    return max(gap(torch.zeros_like(w) if g is None else g, w) for g, w in zip(got, want))


@proof("06")
def early_exit(m):
    """Every sample alone, with a true stop at the first sure head."""
    model, ids = build(m), tokens(16, 6)
    mask = torch.arange(6) < (tokens(16, 1, seed=3, high=5) + 2)
    left, rows = set(), []
    for row, real in zip(ids, mask):
        row = row[real][None]
        x = model.tokens(row) + model.places.weight[: row.shape[1]]
        for i, (layer, head) in enumerate(zip(model.layers, model.exits)):
            x = layer(x, torch.ones_like(row, dtype=torch.bool))
            logits = head(x.mean(1))
            if logits.softmax(-1).max() > model.threshold:
                break
        left.add(i)
        rows.append(logits)
    assert left == {0, 1}  # both exits are taken
    return gap(model(ids, mask), torch.cat(rows))


@proof("07")
def grid(m):
    """A fresh model and one that has seen a longer input give the same; scores depend on differences of row and column alone."""
    model, ids = build(m), tokens(2, 6)
    fresh = copy.deepcopy(model)(ids)
    rotary, x = copy.deepcopy(model).layers[0].attention.rotary, normal(1, 1, 1, 4).expand(1, 1, 9, 4)
    turned, want = rotary(x), []
    for i in range(9):  # base 100, one pair an axis: angles are row and column
        z = torch.view_as_complex(x[0, 0, i].reshape(2, 2).contiguous()) * torch.polar(torch.ones(2).double(), torch.tensor([i // 3, i % 3]).double())
        want.append(torch.view_as_real(z).flatten())
    assert gap(turned[0, 0], torch.stack(want)) < 1e-9
    model(tokens(1, 20))
    return gap(model(ids), fresh)


@proof("08")
def fusion(m):
    """No mask is a mask of ones; and passages are encoded by hand, of their own lengths, nothing filled up."""
    model, target = build(m), tokens(2, 5, seed=1)
    worst = 0.0
    for S in (3, 6, 8):
        source = tokens(2, S)
        parts = []
        for piece in source.split(m.PASSAGE, 1):
            x = model.source(piece) + model.within.weight[: piece.shape[1]]
            for layer in model.encoder:
                x = layer(x, torch.ones(1, dtype=torch.bool))
            parts.append(model.norm_source(x))
        memory = torch.cat(parts, 1)
        x = model.target(target) + model.places.weight[:5]
        for layer in model.decoder:
            x = layer(x, torch.ones(5, 5).tril().bool(), memory, torch.ones(1, dtype=torch.bool))
        want = model.head(model.norm_target(x))
        assert gap(model(source, target, torch.ones(2, S, dtype=torch.bool)), want) < 1e-9
        here = gap(model(source, target), want)
        assert S % 4 or here < 1e-9
        worst = max(worst, here)
    return worst


@proof("09")
def streamed(m):
    """torch's cross entropy plus c lse^2, by autograd."""
    loss = build(m)
    logits, labels = (3 * normal(2, 5, 11)).requires_grad_(), tokens(2, 5)
    labels[0, 1] = -100
    keep = labels != -100
    naive = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.01 * logits.logsumexp(-1)[keep].square().mean()
    assert gap(loss(logits, labels), naive) < 1e-9  # the value is the same in both
    return gap(*(torch.autograd.grad(z, logits)[0] for z in (loss(logits, labels), naive)))


@proof("10")
def masker(m):
    """What is swapped in: never special, each ordinary id equally often."""
    model = build(m)
    ids = tokens(400, 400)
    inputs, labels = model(ids, 5)
    chosen = labels != -100
    ordinary = ids > 2
    assert abs(float(chosen[ordinary].float().mean()) - 0.15) < 0.005 and not chosen[~ordinary].any()
    assert abs(float((inputs == 2)[chosen].float().mean()) - 0.8) < 0.02
    swapped = chosen & (inputs != ids) & (inputs != 2)
    counts = torch.bincount(inputs[swapped], minlength=11).double()
    share = counts / counts.sum()
    want = torch.where(torch.arange(11) > 2, 1 / 8, 0.0)
    excess = gap(share, want)
    return 0.0 if excess < 0.025 else excess


@proof("11")
def schedule(m):
    """Never above the peak, no jump, and peak ... floor over the whole decay."""
    model = build(m)
    rates = [m.subject.forward(model, s) for s in range(220)]
    assert rates[0] == 0 and rates[20] == 2e-3 and rates[160] == 2e-3 and rates[200] == 2e-4 and rates[219] == 2e-4
    want = [2e-4 + 1.8e-3 * (1 - ((s - 160) / 40) ** 0.5) for s in range(161, 200)]
    wrong = max(abs(a - b) for a, b in zip(rates[161:200], want))
    if max(rates) > 2e-3:
        assert wrong > 1e-6
    return wrong / 2e-3


@proof("12")
def groups(m):
    """Each parameter once; decayed are the weights of Linear and Embedding, and nothing else."""
    model = build(m)
    parts = m.subject.forward(model)
    decay = {id(p): g["weight_decay"] for g in parts for p in g["params"]}
    assert sum(len(g["params"]) for g in parts) == len(decay) == len(list(model.parameters()))
    wrong = 0
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            wrong += (decay[id(p)] > 0) != (name == "weight" and isinstance(module, (torch.nn.Linear, torch.nn.Embedding)))
    torch.optim.AdamW([{k: v for k, v in g.items() if k != "use_muon"} for g in parts])
    return float(wrong)


@proof("13")
def bpe(m):
    """The textbook's loop: the pair of the lowest rank, merged wherever it stands, until none is left."""
    model = build(m)
    generator = torch.Generator().manual_seed(0)
    letters, wrong = "abcdehinst", 0
    words = m.TEXT.split() + ["".join(letters[int(i)] for i in torch.randint(10, (9,), generator=generator)) for _ in range(3000)]
    for word in words:
        naive = list(m.as_bytes(word))
        while True:
            ranks = [model.ranks.get(pair, math.inf) for pair in zip(naive, naive[1:])]
            if not ranks or min(ranks) == math.inf:
                break
            naive = m.apply_merge(naive, model.merges[min(ranks)])
        wrong += model.segment(m.as_bytes(word)) != naive
        assert model.decode(model.encode(word)) == word
    text = "  Ünïcode — 文字 \n\t ok!? "
    assert model.decode(model.encode(text)) == text
    return float(wrong)


@proof("14")
def rmsnorm(m):
    """Autograd of the formula."""
    model = build(m)
    x, up = normal(2, 3, C.d_model).requires_grad_(), normal(2, 3, C.d_model, seed=1)
    naive = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.weight
    assert gap(model(x), naive) < 1e-9
    got, want = (torch.autograd.grad((y * up).sum(), [x, model.weight]) for y in (model(x), naive))
    plain = m.RMSNorm(C.d_model).double()
    first = torch.autograd.grad((plain(x) * up).sum(), x)[0]
    assert gap(first, torch.autograd.grad((F.rms_norm(x, (C.d_model,), eps=1e-6) * up).sum(), x)[0]) < 1e-9  # gain 1: right in both
    return max(gap(a, b) for a, b in zip(got, want))


@proof("15")
def speculative(m):
    """Greedy by the whole sequence, one token at a time, no cache; and the cached forward is the whole one."""
    model, wrong = build(m), 0
    with torch.no_grad():  # freshly drawn, it says one token for ever
        for layer in model.layers:
            for p in layer.parameters():
                p.mul_(3)
    ids = tokens(2, 7)
    assert gap(m.cached(model, [ids[:, :2], ids[:, 2:3], ids[:, 3:]]), model(ids)) < 1e-9
    for seed in range(8):
        prompt = tokens(3, 4, seed=seed)
        naive = prompt
        for _ in range(12):
            naive = torch.cat([naive, model(naive)[:, -1].argmax(-1, keepdim=True)], 1)
        assert torch.equal(m.generate(model, prompt, 12, False), naive)
        wrong += int((m.generate(model, prompt, 12, True) != naive).any(1).sum())
    return float(wrong)


@proof("16")
def split(m):
    """torch's kernel, with the causal mask at the last key, and rows without keys as zeros."""
    worst = 0.0
    for T, S in ((5, 16), (40, 40), (3, 50)):
        q, k, v = normal(2, 4, T, 6), normal(2, 2, S, 6, seed=1), normal(2, 2, S, 5, seed=2)
        mask = torch.rand(2, 1, T, S, generator=torch.Generator().manual_seed(0)) < 0.6
        mask[0, 0, 0] = False
        mask[1, 0, :, :20] = False
        for causal in (False, True):
            for given in (None, mask):
                allowed = torch.ones(T, S, dtype=torch.bool).tril(S - T if causal else S)
                allowed = (allowed if given is None else allowed & given).expand(2, 4, T, S)
                scores = torch.einsum("bhtd,bhsd->bhts", q, k[:, [0, 0, 1, 1]]) / math.sqrt(6)
                weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
                here = gap(m.attend(None, q, k, v, given, causal), weights @ v[:, [0, 0, 1, 1]])
                assert S > 16 or here < 1e-9  # one split: right in both
                worst = max(worst, here)
    return worst


@proof("17")
def null_memory(m):
    """Hidden memory is memory taken away; the whole by loops."""
    model = build(m)
    x, memory = normal(3, 4, C.d_model), normal(3, 6, C.d_model, seed=1)
    mask = torch.arange(6) < torch.tensor([[6], [4], [0]])
    rows = []
    for b, n in enumerate((6, 4, 0)):
        heads = []
        for h in range(C.num_heads):
            part = slice(4 * h, 4 * h + 4)
            q = model.to_q(x[b])[:, part]
            k = torch.cat([model.null_k[h], model.to_k(memory[b, :n])[:, part]])
            v = torch.cat([model.null_v[h], model.to_v(memory[b, :n])[:, part]])
            heads.append((q @ k.T / 2).softmax(-1) @ v)
        rows.append(model.to_out(torch.cat(heads, -1)))
    assert gap(model(x[:1], memory[:1]), rows[0]) < 1e-9
    return gap(model(x, memory, mask), torch.stack(rows))


@proof("18")
def yarn(m):
    """Rotations keep lengths and products depend on differences; frequencies by scalars, turned as complex numbers."""
    worst = 0.0
    for d in (4, 8, 16):
        model = m.YarnRotary(d)
        x, p = normal(1, 2, 9, d), torch.tensor([0, 1, 2, 7, 30, 100, 1000, 5000, 20000])
        z = torch.complex(x[..., : d // 2], x[..., d // 2 :])
        for i in range(d // 2):
            f = 10000.0 ** (-2 * i / d)
            r = 8192 / (2 * math.pi / f)
            g = 0.0 if r < 1 else 1.0 if r > 32 else (r - 1) / 31
            z[..., i] *= torch.exp(1j * p.double() * ((1 - g) * f / 4 + g * f))
        y = model(x, p)
        worst = max(worst, gap(y, torch.cat([z.real, z.imag], -1)), gap(y.norm(dim=-1), x.norm(dim=-1)))
    return worst


@proof("19")
def differential(m):
    """A padded sample is the sample without its padding; the attention by loops."""
    model = build(m)
    x, mask = normal(2, 6, C.d_model), torch.arange(6) < torch.tensor([[6], [4]])
    a, y, rows = model.attention, normal(1, 5, C.d_model, seed=2), []
    q, k, v = a.q(y)[0], a.k(y)[0], a.v(y)[0]
    for h in range(a.heads):
        one, two = slice(4 * h, 4 * h + 4), slice(C.d_model + 4 * h, C.d_model + 4 * h + 4)
        w = (q[:, one] @ k[:, one].T / 2).softmax(-1) - a.lam() * (q[:, two] @ k[:, two].T / 2).softmax(-1)
        rows.append(a.norm(w @ v[:, one]) * (1 - a.start))
    assert gap(a(y)[0], a.o(torch.cat(rows, -1))) < 1e-9
    return gap(model(x, mask)[1, :4], model(x[1:, :4])[0])


@proof("20")
def linear(m):
    """A padded sample is the sample without its padding; the attention as T x T weights."""
    model = build(m)
    ids, mask = tokens(2, 6), torch.arange(6) < torch.tensor([[6], [3]])
    a, x = model.blocks[0].attn, normal(1, 5, C.d_model)
    q, k, v = (w(x)[0].unflatten(-1, (C.num_heads, -1)) for w in (a.wq, a.wk, a.wv))
    w = torch.einsum("thd,shd->hts", torch.where(q > 0, q + 1, q.exp()), torch.where(k > 0, k + 1, k.exp()))
    naive = torch.einsum("hts,shd->thd", w / w.sum(-1, keepdim=True), v).flatten(1)
    assert gap(a(x, None)[0], a.wo(naive)) < 1e-9
    return gap(model(ids, mask)[1, :3], model(ids[1:, :3])[0])


def runs(module):
    """Build with the sizes of nothing said, and one forward in float32."""
    s, c = module.subject, C
    model = s.build(c) if s.build is not None else None
    ids, x = tokens(2, 6), normal(2, 6, c.d_model).float()
    q = normal(2, 2, 6, 4).float()
    inputs = {
        "decoder": (ids,), "encoder": (ids,), "classifier": (ids,), "encoder_decoder": (ids, ids), "feed_forward": (x,), "layer": (x,),
        "norm": (x,), "cross_attention": (x, x), "attention": (q, q, q), "rotary": (q, torch.arange(6)), "schedule": (3,),
        "loss": (normal(2, 6, 11).float(), ids), "masking": (ids, 0), "tokenizer": ("a text",), "parameter_groups": (),
    }[s.kind]
    return s.kind, s.forward(model, *inputs)


def main():
    kinds, failed = {}, 0
    for number in sorted(PROOFS):
        right, = HERE.glob(f"{number}_*_right.py")
        wrong, = HERE.glob(f"{number}_*_wrong.py")
        off = []
        for path in (right, wrong):
            module = load(path)
            kind, _ = runs(module)
            off.append(PROOFS[number](module))
        kinds.setdefault(kind, []).append(number)
        good = off[0] < 1e-9 and off[1] > 1e-3
        failed += not good
        print(f"{'ok ' if good else 'BAD'} {right.stem[:-6]:28} {kind:17} right {off[0]:.1e}   wrong {off[1]:.3g}   {PROOFS[number].__doc__}")
    print(len(PROOFS), "pairs,", len(kinds), "kinds,", sum(len(kinds[k]) for k in kinds if k in ("decoder", "encoder", "classifier", "encoder_decoder")), "whole models,", failed, "bad")
    return failed


if __name__ == "__main__":
    sys.exit(main())
