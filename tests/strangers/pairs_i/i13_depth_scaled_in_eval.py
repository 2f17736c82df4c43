"""A ViT-like encoder with stochastic depth after timm's `DropPath` (`scale_by_keep`); places are counted over the real tokens,
so that padding may stand on both sides. Nothing is declared."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "In eval mode every branch is multiplied by the share of it that is kept in training (as in the paper of Huang et al.), "
    "while training divides by that share already: the branches are 0.9, 0.8 ... of what they were trained for, the deeper "
    "the less. Without stochastic depth (rate 0) nothing is seen; with it, what a trained model computes in eval depends on "
    "the rate."
)
PLACE = "WrongDropPath.forward"


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.keep = 1.0 - rate

    def draw(self, x):
        if self.keep == 1.0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < self.keep
        return x * kept / self.keep

    def forward(self, x):
        return self.draw(x) if self.training else x


class WrongDropPath(DropPath):
    def forward(self, x):
        return self.draw(x) if self.training else x * self.keep


class Block(nn.Module):
    def __init__(self, c, path):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, d))
        self.drop_path = path

    def attention(self, x, hidden):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("bthc,bshc->bhts", q, k) / q.shape[-1] ** 0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return self.proj(torch.einsum("bhts,bshc->bthc", scores.softmax(-1), v).flatten(2))

    def forward(self, x, hidden):
        x = x + self.drop_path(self.attention(self.norm1(x), hidden))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class Encoder(nn.Module):
    def __init__(self, c, path):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(2048, c.d_model)
        rates = [c.dropout * (i + 1) / c.num_layers for i in range(c.num_layers)]
        self.blocks = nn.ModuleList(Block(c, path(rate)) for rate in rates)
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            hidden, at = None, torch.arange(tokens.shape[1], device=tokens.device)
        else:
            hidden = ~attention_mask.bool()[:, None, None]
            at = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.tokens(tokens) + self.places(at)
        for block in self.blocks:
            x = block(x, hidden)
        return self.norm(x)


def make(path):
    return Subject(
        kind="encoder",
        name="encoder with stochastic depth",
        build=lambda c: Encoder(c, path),
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    )


right, wrong = make(DropPath), make(WrongDropPath)


if __name__ == "__main__":
    torch.manual_seed(0)
    ones = torch.ones(200000, 1)
    for cls, kept in ((DropPath, 1.0), (WrongDropPath, 0.8)):
        path = cls(0.2)
        trained, still = path.train()(ones).mean().item(), path.eval()(ones).mean().item()
        print(cls.__name__, "mean in training", trained, "in eval", still)
        assert abs(trained - 1) < 0.01 and abs(still - kept) < 1e-6  # what is expected in training holds in eval
    tokens = torch.randint(0, 11, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, 6:] = False
    mask[1, :2] = False
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        plain = right.build(DrawnConfig(d_model=12, num_heads=3, dropout=0.0))
        with torch.no_grad():
            for p in plain.parameters():
                p.normal_(0, 0.5 if p.dim() > 1 else 0.8)

        def slow(row):
            """torch's own pre-LN layers with the same weights."""
            x = plain.tokens.weight[row].double() + plain.places.weight[: len(row)].double()
            for b in plain.blocks:
                n = nn.TransformerEncoderLayer(12, 3, 20, 0.0, F.gelu, batch_first=True, norm_first=True)
                n.self_attn.in_proj_weight.data, n.self_attn.in_proj_bias.data = b.qkv.weight.detach(), b.qkv.bias.detach()
                for to, of in ((n.self_attn.out_proj, b.proj), (n.linear1, b.mlp[0]), (n.linear2, b.mlp[2])):
                    to.load_state_dict(of.state_dict())
                n.norm1.load_state_dict(b.norm1.state_dict())
                n.norm2.load_state_dict(b.norm2.state_dict())
                x = n.double().train()(x[None])[0]
            return F.layer_norm(x, (12,), plain.norm.weight.double(), plain.norm.bias.double())

        truth = [slow(tokens[b][mask[b]]) for b in (0, 1)]
        for rate in (0.0, 0.1, 0.3):
            c, far = DrawnConfig(d_model=12, num_heads=3, dropout=rate), []
            for subject in (right, wrong):
                m = subject.build(c).to(dtype).eval()
                m.load_state_dict(plain.state_dict())
                y = m(tokens, mask)
                far.append(max((y[b][mask[b]] - truth[b]).abs().max().item() for b in (0, 1)))
                if rate == 0:
                    assert (m.train()(tokens, mask) - y).abs().max() < small
                else:
                    drawn = torch.stack([m.train()(tokens, mask) for _ in range(40)])
                    assert drawn.std(0).max() > 0.1  # training drops
            print(dtype, rate, "right %.1e wrong %.2e" % tuple(far))
            assert far[0] < small and (far[1] > 0.02 if rate else far[1] < small)
