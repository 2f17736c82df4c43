"""Memory-lean attention for inference on small cards: four query heads at a time, 128 queries at a time."""
import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Where a chunk of four query heads begins in the middle of a key-value group (7 query heads a group as in Qwen2, or 3, 5, 6), "
    "the group's key-value head is repeated from the start of the chunk, so later heads of the chunk read the wrong group."
)
PLACE = "_kv_for_heads: the heads of the first group that the previous chunks already used are not skipped"

HEADS_AT_ONCE = 4
QUERIES_AT_ONCE = 128


class LeanAttention(nn.Module):
    """Softmax attention with grouped key-value heads, [B,H,T,K] x [B,G,S,K] x [B,G,S,E] -> [B,H,T,E]."""

    def __init__(self, config: DrawnConfig):
        super().__init__()
        self.config = config

    def _kv_for_heads(self, kv, start, stop, group_size):
        first_group, used = divmod(start, group_size)
        last_group = (stop - 1) // group_size
        repeated = kv[:, first_group : last_group + 1].repeat_interleave(group_size, dim=1)
        return repeated[:, used : used + stop - start]

    def forward(self, q, k, v, attention_mask=None, causal=False):
        input_dtype = q.dtype
        dtype = torch.float64 if input_dtype == torch.float64 else torch.float32
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        _, num_heads, q_len, head_dim = q.shape
        kv_len = k.shape[2]
        group_size = num_heads // k.shape[1]
        allowed = None
        if causal:
            allowed = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - q_len)[None, None]
        if attention_mask is not None:
            m = attention_mask.bool()
            m = m[None, None] if m.dim() == 2 else m[:, None]
            allowed = m if allowed is None else allowed & m
        head_outputs = []
        for start in range(0, num_heads, HEADS_AT_ONCE):
            stop = min(start + HEADS_AT_ONCE, num_heads)
            k_part = self._kv_for_heads(k, start, stop, group_size)
            v_part = self._kv_for_heads(v, start, stop, group_size)
            rows = []
            for i in range(0, q_len, QUERIES_AT_ONCE):
                scores = q[:, start:stop, i : i + QUERIES_AT_ONCE] @ k_part.transpose(2, 3) * head_dim**-0.5
                if allowed is None:
                    probs = scores.softmax(-1)
                else:
                    now = allowed[:, :, i : i + QUERIES_AT_ONCE]
                    empty = ~now.any(-1, keepdim=True)
                    scores = scores.masked_fill(~now & ~empty, float("-inf"))
                    probs = scores.softmax(-1).masked_fill(empty, 0.0)
                rows.append(probs @ v_part)
            head_outputs.append(torch.cat(rows, dim=2))
        return torch.cat(head_outputs, dim=1).to(input_dtype)


class LeanAttentionShifted(LeanAttention):
    def _kv_for_heads(self, kv, start, stop, group_size):
        first_group = start // group_size
        last_group = (stop - 1) // group_size
        repeated = kv[:, first_group : last_group + 1].repeat_interleave(group_size, dim=1)
        return repeated[:, : stop - start]


def _subject(cls):
    return Subject(
        kind="attention",
        name=cls.__name__,
        build=cls,
        mask_forms=("pairwise",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "half_precision": True,
        },
    )


right = _subject(LeanAttention)
wrong = _subject(LeanAttentionShifted)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(6)

    def error(sub, h, g, t, s, causal, masked):
        q, k, v = torch.randn(2, h, t, 8), torch.randn(2, g, s, 8), torch.randn(2, g, s, 5)
        mask = torch.rand(t, s) > 0.4 if masked else None
        ok = torch.ones(t, s, dtype=torch.bool)
        ok = ok.tril(s - t) if causal else ok
        ok = ok & mask if masked else ok
        kk, vv = k.double().repeat_interleave(h // g, 1), v.double().repeat_interleave(h // g, 1)
        w = (q.double() @ kk.mT / 8**0.5).masked_fill(~ok, float("-inf")).softmax(-1).nan_to_num(0.0)
        return (sub.build(DrawnConfig())(q, k, v, mask, causal).double() - w @ vv).abs().max().item()

    for causal in (False, True):
        for masked in (False, True):
            for h, g in [(1, 1), (2, 1), (4, 2), (6, 2), (6, 3), (6, 1), (8, 8), (8, 2), (8, 1), (16, 4), (7, 7), (12, 12), (24, 12)]:
                for t, s in [(5, 7), (150, 20)]:
                    assert error(right, h, g, t, s, causal, masked) < 2e-5
                    assert error(wrong, h, g, t, s, causal, masked) < 2e-5, (h, g)
            for h, g in [(9, 3), (12, 4), (10, 2), (12, 2), (14, 2), (28, 4), (24, 8)]:
                assert error(right, h, g, 5, 7, causal, masked) < 2e-5
                assert error(wrong, h, g, 5, 7, causal, masked) > 0.1, (h, g)
    print("ok")
