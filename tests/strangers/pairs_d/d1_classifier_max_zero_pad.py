import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("Max pooling multiplies the states with the mask, so padded positions count as 0 instead of -inf: a channel that "
        "is negative at all real tokens is pooled to 0 as soon as the sample has padding.")
PLACE = "max pooling of the classifier"


def sines(T, D, like):
    at = torch.arange(T, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    return torch.stack([at.sin(), at.cos()], -1).flatten(1)[:, :D].to(like)


class MaxClassifier(nn.Module):
    def __init__(self, vocab, d, heads, d_ff, classes, buggy=False):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ffn = nn.Sequential(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d))
        self.head = nn.Linear(d, classes)
        self.heads, self.buggy = heads, buggy

    def states(self, tokens, mask):
        x = self.emb(tokens)
        x = x + sines(*x.shape[1:], x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.n3(x + self.ffn(self.n2(x)))

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens).bool() if attention_mask is None else attention_mask.bool()
        x = self.states(tokens, mask)
        if self.buggy:
            pooled = (x * mask[..., None].to(x.dtype)).amax(1)
        else:
            pooled = x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min).amax(1)
            pooled = pooled * mask.any(1, keepdim=True).to(x.dtype)
        return self.head(pooled)


def subject(buggy):
    return Subject(kind="classifier", mask_forms=("padding",), name="max classifier",
                   build=lambda c: MaxClassifier(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_classes, buggy),
                   declares={"pooling": "max", "positions": "sinusoidal", "causal": False, "norm": "layer",
                             "norm_placement": "pre", "final_norm": True, "activation": "relu", "padding_side": "right",
                             "stacked": False})


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = (MaxClassifier(11, 16, 2, 32, 3, w).double().eval() for w in (False, True))
    b.load_state_dict(a.state_dict())
    tokens, mask = torch.randint(11, (2, 7)), torch.arange(7)[None] < torch.tensor([[3], [7]])
    naive = torch.cat([a.head(a.states(t[None, :n], torch.ones(1, n).bool()).max(1)[0]) for t, n in zip(tokens, (3, 7))])
    gap = [(m(tokens, mask) - naive).abs().amax(1).tolist() for m in (a, b)]
    print(gap)
    assert max(gap[0]) < 1e-12 and gap[1][0] > 1e-2 and gap[1][1] < 1e-12
