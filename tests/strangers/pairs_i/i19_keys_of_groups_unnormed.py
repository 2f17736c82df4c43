"""A decoder with normalised queries and keys without gains (as in Gemma 3's and OLMo's ablations), rotary positions and
torch's own grouped-query attention (`enable_gqa`); two models share the code, one of them without groups."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The helper that normalises queries and keys together stacks them, and where keys have fewer heads it falls back to "
    "queries alone: with grouped heads the keys go into the scores as they were projected. The declared query-key "
    "norm holds for half of the product, and logits grow with the weights again."
)
PLACE = "WrongAttention.normed"


def rms(x):
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.proj = nn.Linear(dim, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def normed(self, q, k):
        return rms(q), rms(k)

    def forward(self, x, freqs, mask):
        B, T, _ = x.shape
        sizes = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        q, k, v = self.proj(x).view(B, T, -1, self.head_dim).split(sizes, dim=2)
        q, k = self.normed(q, k)
        q, k = (self.turn(y, *freqs).transpose(1, 2) for y in (q, k))
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), attn_mask=mask, enable_gqa=self.n_heads != self.n_kv_heads)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))

    @staticmethod
    def turn(x, cos, sin):
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class WrongAttention(Attention):
    def normed(self, q, k):
        if q.shape == k.shape:
            return rms(torch.stack((q, k))).unbind()
        return rms(q), k


class Block(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.attn = attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.gate, self.up = (nn.Linear(c.d_model, c.d_ff, bias=False) for _ in range(2))
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(c.d_model)) for _ in range(2))

    def forward(self, x, freqs, mask):
        x = x + self.attn(rms(x) * self.norms[0], freqs, mask)
        h = rms(x) * self.norms[1]
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, c, attention):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, attention) for _ in range(c.num_layers))
        self.norm = nn.Parameter(torch.ones(c.d_model))
        self.unembed = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        t, size = tokens.shape[1], self.blocks[0].attn.head_dim
        rate = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size)
        angle = torch.arange(t, dtype=torch.float64, device=x.device)[:, None, None] * rate
        freqs = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None]
            # a row of padding on the left sees itself, so that no softmax is empty; nobody reads it
            allowed = allowed | torch.eye(t, dtype=torch.bool, device=x.device)
        for block in self.blocks:
            x = block(x, freqs, allowed)
        return self.unembed(rms(x) * self.norm)


def make(attention):
    return Subject(
        kind="decoder",
        name="decoder with query-key norm",
        build=lambda c: Decoder(c, attention),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        domain={"d_model": [16, 32], "num_heads": [4], "num_key_value_heads": [1, 2]},
        declares={
            "query_key_norm": True, "grouped_queries": True, "attention_scale": "1/sqrt(d_head)", "positions": "rotary",
            "layout": "interleaved", "base": 10000, "norm": "rms", "norm_placement": "pre", "final_norm": True,
            "activation": "swiglu", "bias": False, "tied": False, "padding_side": "both",
        },
    )  # fmt: skip


right, wrong = make(Attention), make(WrongAttention)


if __name__ == "__main__":
    torch.manual_seed(0)
    for groups in (1, 2, 4):
        c = DrawnConfig(d_model=16, num_heads=4, num_key_value_heads=groups, num_layers=2)
        good, bad = right.build(c), wrong.build(c)
        with torch.no_grad():
            for p in good.parameters():
                p.normal_(float(p.dim() == 1), 0.5)
        bad.load_state_dict(good.state_dict())
        w = {k: v.double() for k, v in good.state_dict().items()}
        tokens = torch.randint(0, 11, (2, 8))
        mask = torch.ones(2, 8, dtype=torch.bool)
        mask[0, 6:] = False
        mask[1, :2] = False

        def unit(x):
            return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

        def slow(row):
            x = w["embed.weight"][row]
            turn = torch.exp(1j * torch.arange(len(row))[:, None] * torch.tensor([1, 0.01], dtype=torch.float64))
            for l in range(2):
                p = f"blocks.{l}."
                f = (unit(x) * w[p + "norms.0"]) @ w[p + "attn.proj.weight"].T
                heads = []
                for h in range(4):
                    g = h // (4 // groups)
                    q, k, v = (f[:, 4 * i : 4 * i + 4] for i in (h, 4 + g, 4 + groups + g))
                    q, k = (torch.view_as_complex(unit(y).view(-1, 2, 2)) * turn for y in (q, k))
                    s = (q @ k.mH).real / 2
                    heads.append((s + torch.full_like(s, -torch.inf).triu(1)).softmax(-1) @ v)
                x = x + torch.cat(heads, 1) @ w[p + "attn.out.weight"].T
                h = unit(x) * w[p + "norms.1"]
                x = x + (F.silu(h @ w[p + "gate.weight"].T) * (h @ w[p + "up.weight"].T)) @ w[p + "down.weight"].T
            return (unit(x) * w["norm"]) @ w["unembed.weight"].T

        truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-3)):
            far = []
            for m in (good, bad):
                y = m.to(dtype)(tokens, mask)
                far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
                assert (m(tokens[:, :4]) - m(tokens)[:, :4]).abs().max() < small
            print(groups, dtype, "right %.1e wrong %.2f" % tuple(far))
            assert far[0] < small and (far[1] > 0.1 if groups < 4 else far[1] < small)
