"""Self-attention that pads to buckets of 64 so that a compiler sees few shapes (in-house inference code); the mask of
what is padding in a bucket is kept on the module. Up to 64 positions run as they are."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The mask of the bucket is kept under the bucket's length alone, though it says how many of its positions are real: "
    "a second sequence of another length in the same bucket gets the mask of the first. Shorter ones attend to zeros of "
    "the padding, longer ones do not see their own end. Only beyond 64 positions, only with no attention_mask, only on "
    "the second call."
)
PLACE = "Wrong.key: the length is not part of it"
BUCKET = 64


class SelfAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.w_qkv = nn.Linear(d_model, 3 * d_model)
        self.w_out = nn.Linear(d_model, d_model)
        self.kept = {}

    def key(self, bucket, length, device):
        return bucket, length, str(device)

    def real(self, bucket, length, device):
        key = self.key(bucket, length, device)
        if key not in self.kept:
            if len(self.kept) > 64:
                self.kept.clear()
            self.kept[key] = torch.arange(bucket, device=device) < length
        return self.kept[key]

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        bucket = t if t <= BUCKET else -(-t // BUCKET) * BUCKET
        if bucket > t:
            x = torch.cat((x, x.new_zeros(b, bucket - t, d)), 1)
        if attention_mask is not None:
            allowed = torch.zeros(b, bucket, dtype=torch.bool, device=x.device)
            allowed[:, :t] = attention_mask.bool()
        elif bucket > t or t > BUCKET:
            allowed = self.real(bucket, t, x.device)[None]
        else:
            allowed = torch.ones(1, t, dtype=torch.bool, device=x.device)
        q, k, v = self.w_qkv(x).view(b, bucket, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-2, -1)).div((d // self.h) ** 0.5)
        scores = scores.masked_fill(~allowed[:, None, None, :], torch.finfo(scores.dtype).min)
        mixed = torch.matmul(scores.softmax(-1), v).permute(0, 2, 1, 3).reshape(b, bucket, d)
        return self.w_out(mixed[:, :t])


class Wrong(SelfAttention):
    def key(self, bucket, length, device):
        return bucket, str(device)


def projections(m):
    d = m.w_out.in_features
    w, b = m.w_qkv.weight, m.w_qkv.bias
    return {
        "q": w[:d], "k": w[d : 2 * d], "v": w[2 * d :], "o": m.w_out.weight,
        "q_bias": b[:d], "k_bias": b[d : 2 * d], "v_bias": b[2 * d :], "o_bias": m.w_out.bias,
    }  # fmt: skip


def make(cls):
    return Subject(
        kind="self_attention",
        name="bucketed self-attention",
        build=lambda c: cls(c.d_model, c.num_heads),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        projections=projections,
        declares={"causal": False, "positions": "none", "bias": True},
    )


right, wrong = make(SelfAttention), make(Wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    reference = nn.MultiheadAttention(16, 4, batch_first=True).double()
    good, bad = SelfAttention(16, 4).double(), Wrong(16, 4).double()
    for m in (good, bad):
        m.w_qkv.weight.data.copy_(reference.in_proj_weight)
        m.w_qkv.bias.data.copy_(reference.in_proj_bias)
        m.w_out.load_state_dict(reference.out_proj.state_dict())
    for dtype, small in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        good.to(dtype), bad.to(dtype)
        bad.kept.clear()
        worst = 0
        for length in (5, 64, 9, 100, 70, 128, 100, 200, 130):
            x = torch.randn(2, length, 16, dtype=torch.float64)
            truth = reference(x, x, x, need_weights=False)[0]
            a, b = ((m(x.to(dtype)) - truth).abs().max().item() for m in (good, bad))
            mask = torch.ones(2, length, dtype=torch.bool)
            assert (bad(x.to(dtype), mask) - truth).abs().max() < small
            print(dtype, length, f"right {a:.1e} wrong {b:.1e}")
            assert a < small
            worst = max(worst, b)
            assert b < small or length > 64
            if length == 64:
                cut = mask.clone()
                cut[1, 40:] = False
                y = reference(x, x, x, key_padding_mask=~cut, need_weights=False)[0]
                assert (good(x.to(dtype), cut) - y).abs().max() < small
        assert worst > 0.01
