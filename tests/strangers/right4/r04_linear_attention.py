"""An encoder with linear attention (Katharopoulos et al.): phi(x) = elu(x) + 1, keys and values summed into one matrix per
head, so that nothing grows with the square of the length. ScaleNorm (Nguyen and Salazar), learned places that are counted
over the real tokens, masks that multiply keys.

Why it is right: sum_s phi(q)phi(k_s) v_s / sum_s phi(q)phi(k_s) is a mean with positive weights over the real tokens, whatever
the order of summation. Below: against that mean in loops in float64, padding on both sides, an empty sample finite, and
the largest tensor measured at two lengths."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class ScaleNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.tensor(d**0.5))

    def forward(self, x):
        return x * (self.g / x.norm(dim=-1, keepdim=True).clamp(min=1e-5))


class LinearAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv, self.to_out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, real):
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.to_qkv(x).chunk(3, -1))  # b t h k
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if real is not None:
            k = k * real[:, :, None, None]
        memory = torch.einsum("bthk,bthv->bhkv", k, v)
        top = torch.einsum("bthk,bhkv->bthv", q, memory)
        below = torch.einsum("bthk,bhk->bth", q, k.sum(1)).clamp(min=torch.finfo(x.dtype).tiny ** 0.5)
        return self.to_out((top / below[..., None]).flatten(2))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.tokens, self.places = nn.Embedding(c.vocab_size, d), nn.Embedding(2048, d)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                (ScaleNorm(d), LinearAttention(d, c.num_heads), ScaleNorm(d), nn.Linear(d, c.d_ff), nn.Linear(c.d_ff, d))
            )
            for _ in range(c.num_layers)
        )
        self.norm = ScaleNorm(d)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            real, at = None, torch.arange(tokens.shape[1], device=tokens.device)
        else:
            real = attention_mask.bool()
            at = (real.long().cumsum(1) - 1).clamp(min=0)
        x = self.tokens(tokens) + self.places(at)
        for norm_1, attention, norm_2, up, down in self.layers:
            x = x + attention(norm_1(x), real)
            x = x + down(F.relu(up(norm_2(x))))
        return self.norm(x)


def make(**declares):
    return Subject(
        kind="encoder", name="linear attention", build=Encoder, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    )  # fmt: skip


declared = make(
    causal=False, positions="learned", norm="other", norm_placement="pre", final_norm=True, residual=True,
    activation="relu", bias=True, padding_side="both", memory="linear", structure="other", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    from torch.utils._python_dispatch import TorchDispatchMode

    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3)
    model = Encoder(c)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.5) if p.dim() else p.fill_(2.7)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[0, 7:], mask[1, :3], mask[2] = False, False, False

    def slow(row):
        def phi(z):
            return torch.where(z > 0, z + 1, z.exp())

        def norm(x, n):
            return w[n + ".g"] * x / (x @ x).sqrt()

        def lin(x, n):
            return w[n + ".weight"] @ x + w[n + ".bias"]

        xs = [w["tokens.weight"][t] + w["places.weight"][i] for i, t in enumerate(row.tolist())]
        for l in range(2):
            p, new = f"layers.{l}.", []
            f = [lin(norm(x, p + "0"), p + "1.to_qkv") for x in xs]
            for t, x in enumerate(xs):
                heads = []
                for h in range(3):
                    q, k, v = (slice(12 * j + 4 * h, 12 * j + 4 * h + 4) for j in range(3))
                    a = torch.stack([phi(f[t][q]) @ phi(y[k]) for y in f])
                    heads.append(sum(b * y[v] for b, y in zip(a / a.sum(), f)))
                x = x + lin(torch.cat(heads), p + "1.to_out")
                new.append(x + lin(lin(norm(x, p + "2"), p + "3").relu(), p + "4"))
            xs = new
        return torch.stack([norm(x, "norm") for x in xs])

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        y = model.to(dtype)(tokens, mask)
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        print(dtype, f"definition {far:.1e}")
        assert far < small and y.isfinite().all()

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.shape[:1] != (2048,):
                self.size = max(self.size, out.numel())
            return out

    sizes = []
    for length in (100, 200, 400):
        with Largest() as seen, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.long))
        sizes.append(seen.size)
    print("largest tensor at 100, 200, 400", sizes)
    assert sizes[1] == 2 * sizes[0] and sizes[2] == 4 * sizes[0]
