"""A RoBERTa-like encoder: learned positions that are counted over the real tokens of the mask (fairseq's
`make_positions`), so that padding on either side moves nothing."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "With a mask the position ids are the running sum of the mask, taken in the dtype of the model. bfloat16 holds whole "
    "numbers up to 256 only: from the 257th token on neighbours share a position, and every second row of the table (then "
    "three of four) is never read. Without a mask, in float32 and below 257 tokens nothing differs."
)
PLACE = "WrongEncoder.count: `mask.to(dtype).cumsum(1)`"
PAD, LONGEST = 1, 1024


class SelfAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, mask):
        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.output((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d, heads, inner):
        super().__init__()
        self.attention, self.norm_1, self.norm_2 = SelfAttention(d, heads), nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, inner), nn.Linear(inner, d)

    def forward(self, x, mask):
        x = self.norm_1(x + self.attention(x, mask))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(LONGEST + PAD + 1, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def count(self, mask, dtype):
        return mask.long().cumsum(1)

    def forward(self, tokens, mask=None):
        x = self.words(tokens)
        if mask is None:
            at = torch.arange(PAD + 1, PAD + 1 + tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            mask = mask.bool()
            at = (self.count(mask, x.dtype) * mask).long() + PAD
        x = self.norm(x + self.places(at))
        for layer in self.layers:
            x = layer(x, mask)
        return x


class WrongEncoder(Encoder):
    def count(self, mask, dtype):
        return mask.to(dtype).cumsum(1)


def make(cls):
    return Subject(
        kind="encoder",
        name="mini roberta",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={
            "causal": False, "positions": "learned", "norm_placement": "post", "padding_side": "both",
            "max_len": LONGEST, "position_offset": PAD + 1,
        },
    )  # fmt: skip


right, wrong = make(Encoder), make(WrongEncoder)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=16, num_heads=2, num_layers=1)
    good, bad = Encoder(c), WrongEncoder(c)
    for p in good.parameters():
        if p.dim() == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    nn.init.normal_(good.words.weight)
    nn.init.normal_(good.places.weight)
    bad.load_state_dict(good.state_dict())
    with torch.no_grad():
        for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4), (torch.bfloat16, 0.1)):
            for length in (20, 256, 300, 700):
                tokens = torch.randint(0, 11, (2, length))
                ones = torch.ones(2, length, dtype=torch.bool)
                e = []
                for m in (good.to(dtype), bad.to(dtype)):
                    free = m(tokens)
                    e.append((m(tokens, ones) - free).abs().max().item())
                    if m is good:  # padding on both sides
                        wide, hide = F.pad(tokens, (3, 5), value=4), F.pad(ones, (3, 5))
                        assert (m(wide, hide)[:, 3:-5] - free).abs().max() <= small
                print(dtype, length, "with an all-ones mask, less without:", e)
                assert e[0] <= small and (e[1] > 0.5 if dtype == torch.bfloat16 and length > 256 else e[1] <= small)
