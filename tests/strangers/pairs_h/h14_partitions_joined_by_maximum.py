"""Paged attention with partitions, in the style of vLLM's PagedAttention V2: keys and values lie in pages of 16 that a
block table names, eight pages are one partition, and a last step joins the partitions."""

import torch

from veriformer.properties import Subject

WHAT = (
    "The partitions are joined with weights exp(max) alone, without the sum of exponentials of each, as if every "
    "partition had the same one. With one partition (128 keys or fewer) that cancels; beyond, a last partition of few "
    "keys counts as much as a full one of 128."
)
PLACE = "weight_wrong: exp(top - best) without the sum"
PAGE, PAGES_PER_PARTITION = 16, 8


def weight_right(top, total, best):
    return (top - best).exp() * total


def weight_wrong(top, total, best):
    return (top - best).exp() * (total > 0)


class Pages:
    """Keys and values of a batch in one pool, page by page, in an order that only the table knows."""

    def __init__(self, k, v):
        batch, _, self.length, _ = k.shape
        self.count = -(-self.length // PAGE)
        table = torch.arange(batch * self.count, device=k.device).flip(0)
        self.table = torch.cat((table[1::2], table[::2])).view(batch, self.count)
        at = torch.arange(self.length, device=k.device)
        slots = self.table[:, at // PAGE] * PAGE + at % PAGE
        self.keys, self.values = (
            x.new_zeros(batch * self.count * PAGE, x.shape[1], x.shape[3]).index_put((slots,), x.transpose(1, 2))
            for x in (k, v)
        )

    def partition(self, first):
        """Keys, values `[B, G, N, *]` and positions `[N]` of one partition; the last page may reach past the end."""
        pages = self.table[:, first : first + PAGES_PER_PARTITION]
        slots = (pages[..., None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten(1)
        at = first * PAGE + torch.arange(slots.shape[1], device=pages.device)
        return self.keys[slots].transpose(1, 2), self.values[slots].transpose(1, 2), at


def make(weight):
    def paged(model, q, k, v, attention_mask=None, causal=False):
        (b, h, t, d), (g, s) = q.shape, k.shape[1:3]
        wide = torch.promote_types(q.dtype, torch.float32)
        low = torch.finfo(wide).min / 4
        pages = Pages(k, v)
        queries = q.to(wide).view(b, g, h // g, t, d) * d**-0.5
        tops, totals, parts = [], [], []
        for first in range(0, pages.count, PAGES_PER_PARTITION):
            keys, values, at = pages.partition(first)
            see = (at < s).expand(b, t, -1)
            if causal:
                see = see & (at <= torch.arange(t, device=q.device)[:, None] + s - t)
            if attention_mask is not None:
                see = see & attention_mask.bool()[:, at.clamp(max=s - 1)][:, None]
            see = see[:, None, None]
            x = (queries @ keys[:, :, None].to(wide).mT).masked_fill(~see, low)
            top = x.detach().amax(-1, keepdim=True)
            p = (x - top).exp() * see
            total = p.sum(-1, keepdim=True)
            tops.append(top)
            totals.append(total)
            parts.append(p @ values[:, :, None].to(wide) / torch.where(total == 0, torch.ones_like(total), total))
        top, total = torch.stack(tops), torch.stack(totals)
        share = weight(top, total, top.amax(0))
        whole = share.sum(0)
        out = (share * torch.stack(parts)).sum(0) / torch.where(whole == 0, torch.ones_like(whole), whole)
        return out.flatten(1, 2).to(q.dtype)

    return Subject(
        kind="attention",
        name="paged attention",
        forward=paged,
        mask_forms=("padding",),
        declares={"grouped_queries": True, "causal_alignment": "bottom-right", "empty_row": "zeros"},
    )


right, wrong = make(weight_right), make(weight_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, small in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        for t, s, causal in ((3, 5, False), (20, 20, True), (1, 128, False), (1, 130, True), (4, 300, False), (200, 200, True), (9, 4, True)):
            q, k, v = torch.randn(3, 4, t, 8).to(dtype), torch.randn(3, 2, s, 8).to(dtype), torch.randn(3, 2, s, 5).to(dtype)
            mask = torch.arange(s)[None] < torch.tensor([s, s - 2, max(0, s - 150)])[:, None]
            qd, kd, vd = q.double(), *(x.double().repeat_interleave(2, 1) for x in (k, v))
            see = mask[:, None, None] & (torch.ones(t, s).tril(s - t).bool() if causal else torch.tensor(True))
            truth = ((qd @ kd.mT / 8**0.5).masked_fill(~see, -1e300).softmax(-1) * see) @ vd
            a, b = ((f.forward(None, q, k, v, mask, causal) - truth).abs().max().item() for f in (right, wrong))
            print(dtype, (t, s), causal, f"right {a:.1e} wrong {b:.1e}")
            assert a < small and (b > 0.1 if s > 128 else b < small)
    q, k, v = (torch.randn(1, h, n, 3, dtype=torch.float64, requires_grad=True) for h, n in ((2, 3), (1, 140), (1, 140)))
    truth = (q @ k.mT / 3**0.5).softmax(-1) @ v
    g = torch.randn_like(truth)
    for x, y in zip(torch.autograd.grad(truth, (q, k, v), g), torch.autograd.grad(right.forward(None, q, k, v), (q, k, v), g)):
        assert torch.allclose(x, y, atol=1e-12)
