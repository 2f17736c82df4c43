"""Paged attention: keys and values live in pages of 16 slots, a block table says which page holds which stretch of a sequence."""
import math
from dataclasses import dataclass

import torch
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The block table is stored in uint8 to halve its traffic; from the 257th page of the pool on (all samples and key-value heads "
    "share the pool) page numbers wrap round and sequences read the pages of others."
)
PLACE = "PagedCache.fill: block table cast to uint8"

PAGE = 16
PAGES_PER_TILE = 4


@dataclass
class PagedCache:
    key_pool: torch.Tensor  # [pages, PAGE, K]
    value_pool: torch.Tensor  # [pages, PAGE, E]
    block_table: torch.Tensor  # [sequences, pages of the longest]
    context: int

    @classmethod
    def fill(cls, k, v, table_dtype):
        """k [B,G,S,K], v [B,G,S,E]; pages are handed out step by step over the sequences, as they arrive while decoding."""
        batch, groups, context = k.shape[:3]
        per_sequence = -(-context // PAGE)
        sequences = batch * groups
        table = torch.arange(per_sequence * sequences, device=k.device).view(per_sequence, sequences).t()
        pools = []
        for x in (k, v):
            x = torch.nn.functional.pad(x, (0, 0, 0, per_sequence * PAGE - context))
            x = x.reshape(sequences, per_sequence, PAGE, x.shape[-1]).transpose(0, 1)
            pools.append(x.reshape(per_sequence * sequences, PAGE, x.shape[-1]))
        return cls(*pools, table.to(table_dtype), context)

    def tile(self, first_page):
        pages = self.block_table[:, first_page : first_page + PAGES_PER_TILE].long()
        keys = self.key_pool[pages].flatten(1, 2)  # [sequences, slots, K]
        values = self.value_pool[pages].flatten(1, 2)
        slots = torch.arange(first_page * PAGE, first_page * PAGE + keys.shape[1], device=keys.device)
        return keys, values, slots


class PagedAttention(torch.nn.Module):
    def __init__(self, table_dtype=torch.int32):
        super().__init__()
        self.table_dtype = table_dtype

    def forward(self, q, k, v, attention_mask=None, causal=False):
        dtype = q.dtype
        high = torch.promote_types(dtype, torch.float32)
        batch, heads, t_len, width = q.shape
        groups, s_len = k.shape[1:3]
        cache = PagedCache.fill(k.to(high), v.to(high), self.table_dtype)
        # queries of one group share their pages: [sequences, heads of a group, T, K]
        q = q.to(high).reshape(batch * groups, heads // groups, t_len, width) * width**-0.5
        positions = torch.arange(t_len, device=q.device) + s_len - t_len
        keep = None
        if attention_mask is not None:
            keep = attention_mask.bool().repeat_interleave(groups, 0)  # [sequences, S]
        top = q.new_full(q.shape[:3], -math.inf)
        total = q.new_zeros(q.shape[:3])
        acc = q.new_zeros(*q.shape[:3], v.shape[-1])
        for page in range(0, cache.block_table.shape[1], PAGES_PER_TILE):
            keys, values, slots = cache.tile(page)
            hidden = (slots >= cache.context)[None, None, None, :]
            if causal:
                hidden = hidden | (slots[None, :] > positions[:, None])[None, None]
            if keep is not None:
                inside = torch.nn.functional.pad(keep, (0, int(slots[-1]) + 1 - s_len)) if slots[-1] >= s_len else keep
                hidden = hidden | ~inside[:, None, None, int(slots[0]) : int(slots[-1]) + 1]
            scores = torch.einsum("nrtd,nsd->nrts", q, keys).masked_fill(hidden, -math.inf)
            new_top = torch.maximum(top, scores.detach().amax(-1))
            safe_top = torch.where(torch.isneginf(new_top), 0.0, new_top)
            p = torch.exp(scores - safe_top[..., None])
            scale = torch.exp(top - safe_top)
            total = total * scale + p.sum(-1)
            acc = acc * scale[..., None] + torch.einsum("nrts,nse->nrte", p, values)
            top = new_top
        out = acc / torch.where(total == 0, 1.0, total)[..., None]
        return out.reshape(batch, heads, t_len, -1).to(dtype)


DECLARED = {
    "attention_scale": "1/sqrt(d_head)",
    "grouped_queries": True,
    "empty_row": "zeros",
    "causal_alignment": "bottom-right",
    "padding_side": "both",
    "half_precision": True,
    "memory": "linear",
}
right = Subject(
    kind="attention", name="paged", build=lambda c: PagedAttention(), mask_forms=("padding",), declares=DECLARED
)
wrong = Subject(
    kind="attention",
    name="paged-uint8",
    build=lambda c: PagedAttention(torch.uint8),
    mask_forms=("padding",),
    declares=DECLARED,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(5)

    def error(sub, b, h, g, t, s, causal, padded=False):
        q, k, v = torch.randn(b, h, t, 8), torch.randn(b, g, s, 8), torch.randn(b, g, s, 8)
        keep = torch.ones(b, s, dtype=torch.bool)
        if padded:
            keep[0, : s // 2] = False
        ok = keep[:, None, None]
        if causal:
            ok = ok & torch.ones(t, s, dtype=torch.bool).tril(s - t)
        kk, vv = k.double().repeat_interleave(h // g, 1), v.double().repeat_interleave(h // g, 1)
        w = (q.double() @ kk.mT / 8**0.5).masked_fill(~ok, -math.inf).softmax(-1).nan_to_num(0.0)
        got = sub.build(DrawnConfig())(q, k, v, keep if padded else None, causal)
        return (got.double() - w @ vv).abs().max().item()

    for causal in (False, True):
        for b, h, g, t, s in [(2, 4, 2, 5, 5), (3, 2, 2, 40, 33), (2, 4, 4, 7, 300), (1, 8, 8, 100, 512)]:
            for padded in (False, True):
                assert error(right, b, h, g, t, s, causal, padded) < 2e-5
                assert error(wrong, b, h, g, t, s, causal, padded) < 2e-5
        for b, h, g, t, s in [(2, 8, 8, 40, 300), (4, 8, 4, 270, 270), (8, 4, 4, 2, 150)]:
            for padded in (False, True):
                assert error(right, b, h, g, t, s, causal, padded) < 2e-5
                assert error(wrong, b, h, g, t, s, causal, padded) > 0.05
    print("ok")
