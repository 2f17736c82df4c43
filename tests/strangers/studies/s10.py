"""Masked language model. Labels are -100 wherever nothing is to be predicted; ALBERT shares one block by all layers."""
import torch as th
import torch.nn as nn

from veriformer.ablations import Recipe, Study, Task, Variant

V, MASK, T = 14, 13, 12


def mlm(seed, step):
    rng = th.Generator().manual_seed(hash((seed, step, 99)) & 0x7FFFFFFF)
    text = th.randint(0, 12, (32, 1), generator=rng).repeat(1, T)      # a word said over and over, with slips
    slip = th.rand(32, T, generator=rng) < 0.1
    text[slip] = th.randint(0, 12, (int(slip.sum()),), generator=rng)
    hidden = th.rand(32, T, generator=rng) < 0.2
    hidden[:, 3] = True
    return text.masked_fill(hidden, MASK), text.masked_fill(~hidden, -100)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.att = nn.MultiheadAttention(d, 2, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        y = self.n1(x)
        x = x + self.att(y, y, y, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Albert(nn.Module):
    def __init__(self, d=32, n=2, share=True):
        super().__init__()
        self.emb = nn.Embedding(V, d)
        self.pos = nn.Embedding(T, d)
        self.register_buffer("ids", th.arange(T), persistent=False)
        self.out_bias = nn.Parameter(th.zeros(V))
        block = Layer(d)
        self.layers = nn.ModuleList([block] * n if share else [block] + [Layer(d) for _ in range(n - 1)])
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, x):
        h = self.emb(x) + self.pos(self.ids[: x.size(1)])
        for l in self.layers:
            h = l(h)
        return h @ self.emb.weight.T + self.out_bias


study = Study(
    name="albert",
    question="Does a block shared by two layers do as well as two blocks?",
    build=Albert,
    tasks=Task(name="refrain", data=mlm),
    recipe=Recipe(steps=60, learning_rate=1e-2, warm_up=6),
    variants=[Variant("shared"), Variant("own blocks", "sharing", {"share": False}),
              Variant("once", "the second pass through the block", {"n": 1})],
)
