"""A sentence classifier of a company's moderation service: memory is bounded by running four rows at a time."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Rows are run in groups of four; the mask of a group is cut out with the number of the group as its first row rather "
    "than the group's first row. Row 4 gets the mask of row 1, row 5 that of row 2: padding is read, real tokens are "
    "hidden. With four rows or fewer, or no mask, all is right."
)
PLACE = "Wrong.groups: `mask[i : i + len(rows)]` with i counting groups"
ROWS = 4


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.tok, self.pos = nn.Embedding(c.vocab_size, d), nn.Embedding(1200, d)
        self.layers = nn.ModuleList()
        for _ in range(c.num_layers):
            self.layers.append(
                nn.ModuleDict(
                    dict(
                        qkv=nn.Linear(d, 3 * d), out=nn.Linear(d, d), a=nn.LayerNorm(d), b=nn.LayerNorm(d),
                        up=nn.Linear(d, c.d_ff), down=nn.Linear(c.d_ff, d),
                    )
                )
            )  # fmt: skip
        self.heads, self.classes = c.num_heads, nn.Linear(d, c.num_classes)

    def body(self, tokens, mask):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["a"](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
            x = x + layer["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["b"](x))))
        real = mask[..., None].to(x.dtype)
        return self.classes((x * real).sum(1) / real.sum(1).clamp(min=1))

    def groups(self, tokens, mask):
        for start in range(0, len(tokens), ROWS):
            yield tokens[start : start + ROWS], mask[start : start + ROWS]

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        return torch.cat([self.body(t, m) for t, m in self.groups(tokens, mask)])


class Wrong(Classifier):
    def groups(self, tokens, mask):
        for i, rows in enumerate(tokens.split(ROWS)):
            yield rows, mask[i : i + len(rows)]


def make(cls):
    return Subject(
        kind="classifier",
        name="moderation",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={"pooling": "mean", "positions": "learned", "padding_side": "right"},
    )


right, wrong = make(Classifier), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        good, bad = Classifier(DrawnConfig()).to(dtype), Wrong(DrawnConfig()).to(dtype)
        bad.load_state_dict(good.state_dict())
        lengths = torch.tensor([7, 2, 5, 4, 6, 3, 7, 1, 4])
        for batch in (1, 2, 4, 5, 9):
            tokens = torch.randint(0, 11, (batch, 7))
            mask = torch.arange(7)[None] < lengths[:batch, None]
            alone = torch.cat([good(tokens[i : i + 1, : lengths[i]]) for i in range(batch)])
            e = [(m(tokens, mask) - alone).abs().amax(-1) for m in (good, bad)]
            print(dtype, "batch", batch, [f"{x.max().item():.1e}" for x in e], (e[1] > small).nonzero().flatten().tolist())
            assert e[0].max() < small and e[1][:4].max() < small and (batch <= 4 or e[1][4:].max() > 0.01)
            assert (bad(tokens) - good(tokens)).abs().max() < small
