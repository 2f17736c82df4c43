"""A pre-LN encoder whose training pass is checkpointed in up to four segments of layers, as tutorials on activation
checkpointing do it by hand (torch's own `checkpoint_sequential` runs what remains after the last full segment)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "In train mode the layers are run in four segments of num_layers // 4 layers each, and what remains is never run: of "
    "five layers one, of seven three. Evaluation runs all of them, so that with dropout 0 the two modes disagree, and "
    "the last layers get no gradient. Up to four layers, and at multiples of four, nothing is seen."
)
PLACE = "WrongStack.segments: no remainder"
SEGMENTS = 4


class Layer(nn.Module):
    def __init__(self, d, heads, inner, dropout):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, inner), nn.ReLU(), nn.Linear(inner, d))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, hidden):
        h = self.norm_1(x)
        x = x + self.drop(self.attention(h, h, h, attn_mask=hidden, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm_2(x)))


class Stack(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(2048, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def segments(self):
        count = min(SEGMENTS, len(self.layers))
        size = len(self.layers) // count
        starts = [size * i for i in range(count)]
        ends = [*starts[1:], len(self.layers)]
        return [self.layers[a:b] for a, b in zip(starts, ends)]

    def forward(self, tokens, attention_mask=None):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        hidden = None
        if attention_mask is not None:  # additive and finite, so that a row without a key gives no NaN
            hidden = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device)
            hidden = hidden.masked_fill(~attention_mask.bool(), torch.finfo(x.dtype).min / 2)
            hidden = hidden[:, None, None].expand(-1, self.heads, tokens.shape[1], -1).flatten(0, 1)
        if self.training and torch.is_grad_enabled():
            for segment in self.segments():

                def run(y, mask, segment=segment):
                    for layer in segment:
                        y = layer(y, mask)
                    return y

                x = checkpoint(run, x, hidden, use_reentrant=False)
        else:
            for layer in self.layers:
                x = layer(x, hidden)
        return self.norm(x)


class WrongStack(Stack):
    def segments(self):
        count = min(SEGMENTS, len(self.layers))
        size = len(self.layers) // count
        return [self.layers[size * i : size * (i + 1)] for i in range(count)]


def make(cls):
    return Subject(
        kind="encoder",
        name="checkpointed encoder",
        build=cls,
        forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
        declares={"norm_placement": "pre", "final_norm": True, "padding_side": "right", "activation": "relu"},
    )


right, wrong = make(Stack), make(WrongStack)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        for layers in (1, 2, 4, 5, 7, 8):
            c = DrawnConfig(num_layers=layers)
            good, bad = Stack(c).to(dtype), WrongStack(c).to(dtype)
            bad.load_state_dict(good.state_dict())
            tokens = torch.randint(0, 11, (3, 10))
            mask = torch.arange(10)[None] < torch.tensor([10, 7, 4])[:, None]
            gaps, unused = [], []
            for m in (good, bad):
                still = m.eval()(tokens, mask)
                trained = m.train()(tokens, mask)
                trained.pow(3).sum().backward()
                gaps.append((still - trained).abs().max().item())
                unused.append(sum(p.grad is None for p in m.layers.parameters()))
            print(dtype, "layers", layers, "train against eval", gaps, "parameters without a gradient", unused)
            assert gaps[0] < small and unused[0] == 0
            assert (gaps[1] > 0.01 and unused[1] > 0) if layers in (5, 7) else gaps[1] < small
            short = good.eval()(tokens[1:2, :7])
            assert (good(tokens, mask)[1:2, :7] - short).abs().max() < small
