"""Feed-forward block that walks over the tokens in chunks, because the hidden layer is the largest tensor of the model."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The rows of a batch are divided into rows // 64 chunks of rows // n rows each, rounded down, so with 131, 200 ... rows the last "
    "few tokens of the last sample are in no chunk and their output stays zero."
)
PLACE = "ChunkedFeedForward.forward: size of a chunk rounded down"


class ChunkedFeedForward(nn.Module):
    target_rows = 64

    def __init__(self, d_model, d_ff, round_up=True):
        super().__init__()
        self.up = nn.Linear(d_model, d_ff)
        self.down = nn.Linear(d_ff, d_model)
        self.round_up = round_up

    def chunk_size(self, rows):
        n_chunks = max(1, rows // self.target_rows)
        if self.round_up:
            return -(-rows // n_chunks)
        return rows // n_chunks

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        size = self.chunk_size(rows)
        out = flat.new_zeros(rows, self.down.out_features)
        for i in range(max(1, rows // self.target_rows)):
            part = slice(i * size, min((i + 1) * size, rows))
            out[part] = self.down(F.gelu(self.up(flat[part]))).to(out.dtype)
        return out.view_as(x)


facts = {"activation": "gelu", "bias": True, "init": "default"}
right = Subject(
    kind="feed_forward",
    name="chunked-ffn",
    build=lambda c: ChunkedFeedForward(c.d_model, c.d_ff),
    declares=facts,
)
wrong = Subject(
    kind="feed_forward",
    name="chunked-ffn-floor",
    build=lambda c: ChunkedFeedForward(c.d_model, c.d_ff, round_up=False),
    declares=facts,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(21)

    def error(sub, b, t, d=16, f=40):
        m = sub.build(DrawnConfig(d_model=d, d_ff=f))
        x = torch.randn(b, t, d)
        ref = F.gelu(x.double() @ m.up.weight.double().T + m.up.bias.double()) @ m.down.weight.double().T + m.down.bias.double()
        return (m(x) - ref).abs().max().item()

    for b, t in [(1, 1), (2, 7), (3, 21), (1, 64), (1, 100), (2, 64), (2, 65), (1, 127), (4, 64)]:
        assert error(right, b, t) < 1e-5 and error(wrong, b, t) < 1e-5, (b, t)
    for b in range(1, 9):
        for t in (50, 101, 170, 256, 333):
            assert error(right, b, t) < 1e-5
    for b, t in [(1, 129), (1, 131), (1, 200), (5, 53), (3, 111), (8, 50)]:
        assert error(wrong, b, t) > 0.05, (b, t)
    print("ok")
