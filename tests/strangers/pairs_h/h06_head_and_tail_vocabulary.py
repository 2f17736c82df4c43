"""A decoder with an adaptive input embedding (Baevski and Auli; fairseq's AdaptiveInput): frequent tokens have wide
vectors, the rare half narrow ones and a projection. A stack of causal blocks without positions on top."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The cluster of a token is found by torch.bucketize with its default side, which counts a boundary to the left: the "
    "first id of the tail falls into the head, and the clamped row there is that of the id before. This one token is "
    "never told from its neighbour, and the first row of the tail is never trained."
)
PLACE = "WrongInput.cluster: torch.bucketize without right=True"


class AdaptiveInput(nn.Module):
    def __init__(self, vocab, d, ratio=2):
        super().__init__()
        head = vocab - vocab // 2
        edges = [0, head, vocab]
        self.register_buffer("cutoffs", torch.tensor(edges[1:-1]), persistent=False)
        self.edges, self.width = edges, d
        self.tables, self.maps = nn.ModuleList(), nn.ModuleList()
        for i, (low, high) in enumerate(zip(edges, edges[1:])):
            narrow = max(1, d // ratio**i)
            self.tables.append(nn.Embedding(max(1, high - low), narrow))
            self.maps.append(nn.Linear(narrow, d, bias=False))

    def cluster(self, tokens):
        return torch.bucketize(tokens, self.cutoffs, right=True)

    def forward(self, tokens):
        which = self.cluster(tokens)
        out = 0
        for i, (table, to_width) in enumerate(zip(self.tables, self.maps)):
            local = (tokens - self.edges[i]).clamp(0, table.num_embeddings - 1)  # the others look up anything
            vectors = to_width(table(local))
            out = out + torch.where((which == i)[..., None], vectors, torch.zeros_like(vectors))
        return out


class WrongInput(AdaptiveInput):
    def cluster(self, tokens):
        return torch.bucketize(tokens, self.cutoffs)


class Decoder(nn.Module):
    def __init__(self, c, embed):
        super().__init__()
        d = c.d_model
        self.heads = c.num_heads
        self.embed = embed(c.vocab_size, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(c.num_layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(c.num_layers))
        self.up = nn.ModuleList(nn.Linear(d, c.d_ff) for _ in range(c.num_layers))
        self.down = nn.ModuleList(nn.Linear(c.d_ff, d) for _ in range(c.num_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * c.num_layers + 1))
        self.logits = nn.Linear(d, c.vocab_size)

    def forward(self, tokens):
        return self.run(self.embed(tokens))

    def run(self, x):
        for i, (qkv, out, up, down) in enumerate(zip(self.qkv, self.out, self.up, self.down)):
            q, k, v = (
                y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in qkv(self.norms[2 * i](x)).chunk(3, -1)
            )
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + down(F.relu(up(self.norms[2 * i + 1](x))))
        return self.logits(self.norms[-1](x))


def make(embed):
    return Subject(
        kind="decoder",
        name="adaptive input",
        build=lambda c: Decoder(c, embed),
        forward=lambda model, tokens: model(tokens),
        embed=lambda model, x: model.run(x),
        declares={"causal": True, "positions": "none", "norm_placement": "pre", "tied": False},
    )


right, wrong = make(AdaptiveInput), make(WrongInput)


if __name__ == "__main__":
    torch.manual_seed(0)
    for vocab in (11, 12, 300):
        for dtype in (torch.float64, torch.float32):
            c = DrawnConfig(vocab_size=vocab)
            good, bad = right.build(c).to(dtype), wrong.build(c).to(dtype)
            bad.load_state_dict(good.state_dict())
            everything = torch.arange(vocab)
            rows = []
            for token in range(vocab):  # slowly, one by one
                i = 0 if token < good.embed.edges[1] else 1
                row = good.embed.tables[i].weight[token - good.embed.edges[i]]
                rows.append(good.embed.maps[i].weight @ row)
            rows = torch.stack(rows)
            assert torch.allclose(good.embed(everything), rows, atol=1e-6)
            off = (bad.embed(everything) - rows).abs().amax(-1) > 1e-4
            edge = good.embed.edges[1]
            assert off.nonzero().flatten().tolist() == [edge]
            assert torch.cdist(good.embed(everything), good.embed(everything)).add(10 * torch.eye(vocab)).min() > 1e-3
            two = torch.tensor([[1, edge, 2], [1, edge - 1, 2]])
            gaps = [(m(two)[0] - m(two)[1]).abs().max().item() for m in (good, bad)]
            print(vocab, dtype, "ids", edge - 1, edge, "change the logits by", gaps)
            assert gaps[0] > 1e-2 and gaps[1] < 1e-5
            grads = [torch.autograd.grad(m(everything[None]).pow(2).sum(), m.embed.tables[1].weight)[0] for m in (good, bad)]
            assert grads[0][0].abs().max() > 0 and grads[1][0].abs().max() == 0
