"""RetNet (Sun et al. 2023) as a decoder: retention instead of softmax attention, with a decay per head, rotation of queries
and keys, a norm per head and a swish gate. The cache is the recurrent state alone, a matrix per head.

Why it is right: the parallel form, sum over s <= t of gamma^(t-s) (q_t . k_s) v_s, and the recurrence
S_t = gamma S_(t-1) + k_t v_t are the same sum. Below: parallel against the recurrence in loops in float64, cache against
no cache in chunks of any size, causal, blind to padding on both sides."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


def decays(heads, device):
    return 1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64, device=device))


class Retention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.heads, self.size = c.d_model, c.num_heads, c.d_model // c.num_heads
        self.qkvg, self.out = nn.Linear(d, 4 * d, bias=False), nn.Linear(d, d, bias=False)

    def project(self, x, start):
        q, k, v, g = self.qkvg(x).chunk(4, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))
        rate = 10000.0 ** (-torch.arange(0, self.size, 2, dtype=torch.float64, device=x.device) / self.size)
        angle = torch.arange(start, start + x.shape[1], dtype=torch.float64, device=x.device)[:, None] * rate
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turn(y):
            a, b = y[..., ::2], y[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        return turn(q), turn(k) * self.size**-0.5, v, g

    def forward(self, x, real, start=0, state=None):
        """State [B, H, K, K] holds what came before `start`; returns the output and the state after x."""
        q, k, v, g = self.project(x, start)
        if real is not None:
            k = k * real[:, None, :, None]
        t = x.shape[1]
        gamma, at = decays(self.heads, x.device), torch.arange(t, dtype=torch.float64, device=x.device)
        apart = at[:, None] - at[None]
        table = torch.where(apart >= 0, gamma[:, None, None] ** apart.clamp(min=0), 0.0).to(q.dtype)
        y = (q @ k.mT * table) @ v
        if state is not None:
            y = y + (q * (gamma[:, None] ** (at + 1)).to(q.dtype)[..., None]) @ state
        after = (k * (gamma[:, None] ** (t - 1 - at)).to(k.dtype)[..., None]).mT @ v
        if state is not None:
            after = after + state * (gamma**t).to(k.dtype)[:, None, None]
        y = F.rms_norm(y, (self.size,), eps=1e-6).transpose(1, 2).flatten(2)
        return self.out(F.silu(g) * y), after


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_1, self.norm_2, self.retention = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model), Retention(c)
        self.ffn = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, real, start, state):
        y, state = self.retention(self.norm_1(x), real, start, state)
        x = x + y
        return x + self.ffn(self.norm_2(x)), state


class RetNet(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, real=None, start=0, states=None):
        x, after = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, state = block(x, real, start, None if states is None else states[i])
            after.append(state)
        return self.head(self.norm(x)), after


def recurrent(model, chunks, attention_mask=None):
    states, start, outputs = None, 0, []
    for chunk in chunks:
        end = start + chunk.shape[1]
        y, states = model(chunk, None if attention_mask is None else attention_mask[:, start:end], start, states)
        outputs.append(y)
        start = end
    return torch.cat(outputs, 1)


def make(**declares):
    return Subject(
        kind="decoder", name="RetNet", build=RetNet, cache=recurrent, declares=declares,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
        domain={"d_model": [8, 16], "num_heads": [2, 4]},
    )  # fmt: skip


declared = make(
    causal=True, positions="other", norm="layer", norm_placement="pre", final_norm=True, residual=True,
    activation="gelu", output_bias=False, tied=False, padding_side="both", structure="other", embedding_scale=False,
)  # fmt: skip
undeclared = make()


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=8, num_heads=2, num_layers=2)
    model = RetNet(c)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(float("norm" in name and name.endswith("weight")), 0.4)
    w = {k: v.double() for k, v in model.state_dict().items()}
    tokens = torch.randint(0, 11, (2, 9))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 7:], mask[1, :3] = False, False

    def slow(row):
        """S_t = gamma S_(t-1) + k_t v_t, one step at a time."""
        x = w["embed.weight"][row]
        for l in range(2):
            p, out = f"blocks.{l}.", []
            h = F.layer_norm(x, (8,), w[p + "norm_1.weight"], w[p + "norm_1.bias"])
            states = [torch.zeros(4, 4, dtype=torch.float64) for _ in range(2)]
            for t, vector in enumerate(h):
                q, k, v, g = (w[p + "retention.qkvg.weight"] @ vector).chunk(4)
                heads = []
                for i, gamma in enumerate((1 - 1 / 32, 1 - 1 / 64)):
                    r = slice(4 * i, 4 * i + 4)
                    turn = torch.exp(1j * t * torch.tensor([1, 0.01], dtype=torch.float64))
                    a, b = (torch.view_as_real(torch.view_as_complex(z[r].view(2, 2)) * turn).flatten() for z in (q, k))
                    states[i] = gamma * states[i] + torch.outer(b / 2, v[r])
                    y = a @ states[i]
                    heads.append(y / (y @ y / 4 + 1e-6).sqrt())
                out.append(w[p + "retention.out.weight"] @ (F.silu(g) * torch.cat(heads)))
            x = x + torch.stack(out)
            h = F.layer_norm(x, (8,), w[p + "norm_2.weight"], w[p + "norm_2.bias"])
            h = F.gelu(h @ w[p + "ffn.0.weight"].T + w[p + "ffn.0.bias"])
            x = x + h @ w[p + "ffn.2.weight"].T + w[p + "ffn.2.bias"]
        return F.layer_norm(x, (8,), w["norm.weight"], w["norm.bias"]) @ w["head.weight"].T

    truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        m = model.to(dtype)
        y = m(tokens, mask)[0]
        far = max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1))
        causal = (m(tokens[:, :4])[0] - m(tokens)[0][:, :4]).abs().max().item()
        cache = max(
            (recurrent(m, tokens.split(sizes, 1), mask) - y)[mask].abs().max().item() for sizes in ([1] * 9, [4, 1, 4], [9])
        )
        print(dtype, f"recurrence {far:.1e} causality {causal:.1e} cache {cache:.1e}")
        assert max(far, causal, cache) < small
