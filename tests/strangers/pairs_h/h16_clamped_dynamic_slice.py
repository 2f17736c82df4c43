"""Memory-efficient attention after Rabe and Staats, ported from JAX line by line: chunks of 128 queries and 64 keys cut
with `dynamic_slice`, which as in `jax.lax` moves a start that would reach past the end back until the slice fits."""

import torch

from veriformer.properties import Subject

WHAT = (
    "dynamic_slice moves the last chunk of keys back where the length is no multiple of 64, so that it overlaps the chunk "
    "before: the keys in the overlap are counted twice in numerator and denominator. Up to 64 keys, and at multiples of "
    "64, all is right."
)
PLACE = "fresh_wrong: every key of a chunk is counted, the repeated ones too"
QUERY_CHUNK, KEY_CHUNK = 128, 64


def dynamic_slice_in_dim(x, start, size, axis):
    """As jax.lax: the start is clamped to where the slice fits."""
    return x.narrow(axis, max(0, min(start, x.shape[axis] - size)), size)


def fresh_right(keys, start):
    return keys >= start  # what the slice was moved back over has been counted


def fresh_wrong(keys, start):
    return torch.ones_like(keys, dtype=torch.bool)


def summarise(q, k, v, see):
    """Numerator, denominator and maximum of one chunk of keys."""
    x = torch.einsum("...qd,...kd->...qk", q, k).masked_fill(~see, torch.finfo(q.dtype).min / 4)
    top = x.detach().amax(-1, keepdim=True)
    p = (x - top).exp() * see
    return torch.einsum("...qk,...kf->...qf", p, v), p.sum(-1, keepdim=True), top


def make(fresh):
    def query_chunk_attention(q, rows, k, v, mask, causal):
        s = k.shape[-2]
        size = min(KEY_CHUNK, s)
        parts = []
        for start in range(0, s, size):
            keys = dynamic_slice_in_dim(torch.arange(s, device=q.device), start, size, 0)
            see = fresh(keys, start).expand(q.shape[-2], -1)
            if causal:
                see = see & (keys <= rows[:, None])
            see = see[None, None]
            if mask is not None:
                see = see & dynamic_slice_in_dim(mask, start, size, -1)
            parts.append(
                summarise(q, dynamic_slice_in_dim(k, start, size, -2), dynamic_slice_in_dim(v, start, size, -2), see)
            )
        values, weights, tops = (torch.stack(x) for x in zip(*parts))
        share = (tops - tops.amax(0)).exp()
        values, weights = (values * share).sum(0), (weights * share).sum(0)
        return values / torch.where(weights == 0, torch.ones_like(weights), weights)

    def attend(model, q, k, v, attention_mask=None, causal=False):
        t, dtype = q.shape[-2], q.dtype
        wide = torch.promote_types(dtype, torch.float32)
        q, k, v = q.to(wide) * q.shape[-1] ** -0.5, k.to(wide), v.to(wide)
        mask = None
        if attention_mask is not None:  # [T, S] or [B, T, S]
            mask = attention_mask.bool()[None] if attention_mask.dim() == 2 else attention_mask.bool()
            mask = mask[:, None]
        size = min(QUERY_CHUNK, t)
        out = []
        for start in range(0, t, size):
            rows = dynamic_slice_in_dim(torch.arange(t, device=q.device), start, size, 0)
            part = None if mask is None else dynamic_slice_in_dim(mask, start, size, -2)
            y = query_chunk_attention(dynamic_slice_in_dim(q, start, size, -2), rows, k, v, part, causal)
            out.append(y[..., start - int(rows[0]) :, :])
        return torch.cat(out, -2).to(dtype)

    return Subject(
        kind="attention",
        name="memory-efficient attention",
        forward=attend,
        mask_forms=("pairwise",),
        declares={"empty_row": "zeros", "causal_alignment": "top-left"},
    )


right, wrong = make(fresh_right), make(fresh_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for t, s, causal in ((5, 9, False), (64, 64, True), (128, 128, True), (3, 65, False), (70, 70, True), (200, 150, False), (150, 320, False)):
            q, k, v = torch.randn(2, 2, t, 8).to(dtype), torch.randn(2, 2, s, 8).to(dtype), torch.randn(2, 2, s, 5).to(dtype)
            mask = torch.rand(2, t, s) > 0.3
            see = mask[:, None] & (torch.ones(t, s).tril().bool() if causal else torch.tensor(True))
            truth = ((q.double() @ k.double().mT / 8**0.5).masked_fill(~see, -1e300).softmax(-1) * see) @ v.double()
            a, b = ((f.forward(None, q, k, v, mask, causal) - truth).abs().max().item() for f in (right, wrong))
            print(dtype, (t, s), f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.02 and b > 5 * a if s > 64 and s % 64 else b < small)
    q, k, v = (torch.randn(1, 1, n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 67, 67))
    assert torch.autograd.gradcheck(lambda *x: right.forward(None, *x), (q, k, v))
