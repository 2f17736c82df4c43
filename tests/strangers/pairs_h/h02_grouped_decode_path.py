"""A decoder with grouped queries and a fast path for one new token, in the style of an in-house inference engine
(full passes repeat the keys; a step of one token reshapes the query instead, so that nothing is copied)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The path for one new token splits the query heads as (repeats, groups) where the full path has (groups, repeats): "
    "query heads then meet the keys of another group, whenever there is more than one group and more than one query "
    "head a group. With as many key-value heads as heads, or one, cached and uncached decoding agree."
)
PLACE = "WrongEngine.split: view(batch, -1, groups, dim) and a transpose"


class Block(nn.Module):
    def __init__(self, width, heads, groups, inner, engine):
        super().__init__()
        self.heads, self.groups, self.dim, self.engine = heads, groups, width // heads, engine
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, heads * self.dim), nn.Linear(width, 2 * groups * self.dim)
        self.o = nn.Linear(heads * self.dim, width)
        self.fc, self.proj = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, past):
        b, t, _ = x.shape
        h = self.ln_1(x)
        q = self.q(h).view(b, t, self.heads, self.dim)
        k, v = self.kv(h).view(b, t, 2, self.groups, self.dim).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        mix = self.engine.step(q, k, v) if past is not None and t == 1 else self.engine.full(q, k, v)
        x = x + self.o(mix.reshape(b, t, -1))
        return x + self.proj(F.gelu(self.fc(self.ln_2(x)))), (k, v)


class Engine:
    """Attention over a cache; q `[B, T, H, K]`, k and v `[B, G, S, K]`."""

    @staticmethod
    def full(q, k, v):
        repeat, t, s = q.shape[2] // k.shape[1], q.shape[1], k.shape[2]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        seen = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        scores = torch.einsum("bthk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhts,bhsk->bthk", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    def step(self, q, k, v):
        q = self.split(q[:, 0], k.shape[1])
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.join(weights @ v)

    @staticmethod
    def split(q, groups):
        return q.view(q.shape[0], groups, -1, q.shape[-1])

    @staticmethod
    def join(mix):
        return mix


class WrongEngine(Engine):
    @staticmethod
    def split(q, groups):
        return q.view(q.shape[0], -1, groups, q.shape[-1]).transpose(1, 2)

    @staticmethod
    def join(mix):
        return mix.transpose(1, 2)


class Served(nn.Module):
    def __init__(self, c, engine):
        super().__init__()
        self.width = c.d_model
        self.wte = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(
            Block(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff, engine) for _ in range(c.num_layers)
        )
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def places(self, start, count, like):
        at = torch.arange(start, start + count, dtype=torch.float64, device=like.device)[:, None]
        channel = torch.arange(self.width, device=like.device)
        angle = at * 10000.0 ** (-(channel - channel % 2).double() / self.width)
        return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).to(like.dtype)

    def forward(self, tokens, state=None):
        layers, seen = ([None] * len(self.blocks), 0) if state is None else state
        x = self.wte(tokens)
        x = x + self.places(seen, tokens.shape[1], x)
        kept = []
        for block, past in zip(self.blocks, layers):
            x, entry = block(x, past)
            kept.append(entry)
        return self.head(self.ln_f(x)), (kept, seen + tokens.shape[1])


def cached(model, chunks, reorder=None):
    state, outputs = None, []
    for number, chunk in enumerate(chunks):
        logits, state = model(chunk, state)
        outputs.append(logits)
        if number == 0 and reorder is not None:
            state = [(k[reorder], v[reorder]) for k, v in state[0]], state[1]
    return torch.cat(outputs, 1)


def make(engine):
    return Subject(
        kind="decoder",
        name="served gpt",
        build=lambda c: Served(c, engine),
        forward=lambda model, tokens: model(tokens)[0],
        cache=cached,
        declares={"causal": True, "positions": "sinusoidal", "grouped_queries": True, "norm_placement": "pre"},
    )


right, wrong = make(Engine()), make(WrongEngine())


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for heads, groups in ((2, 2), (4, 1), (4, 4), (4, 2), (6, 3), (6, 2)):
            c = DrawnConfig(d_model=24, num_heads=heads, num_key_value_heads=groups)
            good, bad = right.build(c).to(dtype), wrong.build(c).to(dtype)
            for p in good.parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=1.5 * p.shape[1] ** -0.5)
            bad.load_state_dict(good.state_dict())
            tokens = torch.randint(0, 11, (3, 9))
            whole = good(tokens)[0]
            assert torch.equal(whole, bad(tokens)[0])
            chunks = [tokens[:, :4], *tokens[:, 4:].split(1, 1)]
            a, b = ((cached(m, chunks) - whole).abs().max().item() for m in (good, bad))
            print(dtype, "heads", heads, "groups", groups, f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.05 if 1 < groups < heads else b < small)
            changed = tokens.clone()
            changed[:, 5:] = 0
            assert (good(changed)[0] - whole)[:, :5].abs().max() < small
            order = torch.tensor([2, 0, 0])
            beam = cached(good, chunks, order)[:, 4:]
            joined = torch.cat((tokens[order, :4], tokens[:, 4:]), 1)
            assert (beam - good(joined)[0][:, 4:]).abs().max() < small
