"""A prefix language model (UniLM, T5's prefix LM) that takes its first 3 tokens as the task: they see one another both ways, what
follows sees all that came before. T5's buckets both ways, kept by the first layer and used by all; heads are a loop
over a list of small modules, the way course code has it.

Why it is right: the prefix is part of the model, not of the data; outputs from position 2 on depend on no later input, outputs 0..2
on the prefix alone. Below: against a definition pair by pair in float64; that a later token reaches nothing before it except
within the prefix; padding on the right."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

PREFIX, BUCKETS, FAR = 3, 8, 16


def buckets(length, device):
    at = torch.arange(length, device=device)
    ahead = at[None] - at[:, None]
    n, half = ahead.abs(), BUCKETS // 2
    exact = half // 2
    far = exact + (torch.log(n.clamp(min=1).double() / exact) / math.log(FAR / exact) * (half - exact)).long()
    return torch.where(n < exact, n, far.clamp(max=half - 1)) + half * (ahead > 0)


class Head(nn.Module):
    def __init__(self, d, size):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(d, size, bias=False) for _ in range(3))

    def forward(self, x, seen, bias):
        scores = self.query(x) @ self.key(x).transpose(1, 2) / self.query.out_features**0.5 + bias
        return (scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen) @ self.value(x)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.norm_a, self.norm_f = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
        self.heads = nn.ModuleList(Head(d, d // c.num_heads) for _ in range(c.num_heads))
        self.mix = nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, c.d_ff, bias=False), nn.Linear(c.d_ff, d, bias=False)

    def forward(self, x, seen, biases):
        h = self.norm_a(x)
        x = x + self.mix(torch.cat([head(h, seen, bias) for head, bias in zip(self.heads, biases)], -1))
        return x + self.down(F.relu(self.up(self.norm_f(x))))


class PrefixLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed, self.bias = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(BUCKETS, c.num_heads)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model, bias=False), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        t = tokens.shape[1]
        at = torch.arange(t, device=tokens.device)
        seen = (at[None] <= at[:, None]) | ((at[None] < PREFIX) & (at[:, None] < PREFIX))
        seen = seen[None]
        if attention_mask is not None:
            seen = seen & attention_mask.bool()[:, None]
        biases = self.bias(buckets(t, tokens.device)).unbind(-1)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, seen, biases)
        return self.head(self.norm(x))


def make(**declares):
    return Subject(
        kind="decoder", name="prefix LM", build=PrefixLM, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    )  # fmt: skip


declared = make(
    prefix=PREFIX, positions="t5", num_buckets=BUCKETS, max_distance=FAR, bidirectional=True, norm="layer",
    norm_bias=False, norm_placement="pre", final_norm=True, residual=True, activation="relu", bias=False,
    output_bias=False, tied=False, attention_scale="1/sqrt(d_head)", padding_side="right", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    model = PrefixLM(c)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(float(p.dim() == 1), 0.5)
    w = {k: v.double() for k, v in model.state_dict().items()}
    edges = [2 * 8 ** (j / 2) for j in (0, 1)]  # a side has 0, 1, [2, 5.7), beyond

    def slow(row):
        def norm(x, n):
            return F.layer_norm(x, (12,), w[n + ".weight"])

        x, t = w["embed.weight"][row], len(row)
        for l in range(2):
            p, parts = f"layers.{l}.", []
            h = norm(x, p + "norm_a")
            for i in range(3):
                q, k, v = (h @ w[f"{p}heads.{i}.{n}.weight"].T for n in ("query", "key", "value"))
                s = torch.full((t, t), -torch.inf, dtype=torch.float64)
                for a in range(t):
                    for b in range(t):
                        if b <= a or max(a, b) < PREFIX:
                            n = abs(a - b)
                            bucket = n if n < 2 else 1 + sum(n >= e for e in edges)
                            s[a, b] = q[a] @ k[b] / 2 + w["bias.weight"][bucket + 4 * (b > a), i]
                parts.append(s.softmax(1) @ v)
            x = x + torch.cat(parts, 1) @ w[p + "mix.weight"].T
            x = x + (norm(x, p + "norm_f") @ w[p + "up.weight"].T).relu() @ w[p + "down.weight"].T
        return norm(x, "norm") @ w["head.weight"].T

    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        m, worst = model.to(dtype), 0.0
        for length in (1, 2, 3, 4, 9, 20):
            tokens = torch.randint(0, 11, (2, length + 2))
            mask = torch.arange(length + 2)[None] < torch.tensor([length + 2, length])[:, None]
            y = m(tokens, mask)
            worst = max(worst, *((y[b][mask[b]] - slow(tokens[b][mask[b]])).abs().max().item() for b in (0, 1)))
        tokens = torch.randint(0, 11, (1, 8))
        for s in range(8):
            other = tokens.clone()
            other[0, s] = (other[0, s] + 1) % 11
            moved = (m(other) - m(tokens)).abs().amax((0, 2)) > 1e-6
            expected = [t >= s or (t < PREFIX and s < PREFIX) for t in range(8)]
            assert moved.tolist() == expected, (s, moved)
        print(dtype, f"definition {worst:.1e}; later tokens reach nothing before them but within the prefix")
        assert worst < small
