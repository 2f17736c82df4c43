"""Ring attention on one machine: the sequence is sharded over ranks, key-value shards travel round the ring.

Merging follows the lse form: weight of the incoming block is sigmoid(block_lse - lse).
"""
import torch
import torch.nn.functional as F
from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "When a key-value shard arrives, lse is updated before out, so out is blended with sigmoid(block_lse - lse_new) instead of "
    "sigmoid(block_lse - lse_old): every shard after the first weighs too little."
)
PLACE = "RingState.update: the two updates stand in the wrong order"

SHARD = 64
NEVER = -1e30  # lse of a row that has seen nothing; finite, so that differences are


class RingState:
    def __init__(self):
        self.out = None
        self.lse = None

    def update(self, block_out, block_lse):
        if self.out is None:
            self.out, self.lse = block_out, block_lse
            return
        weight = torch.sigmoid(block_lse - self.lse)[..., None]
        self.out = self.out + weight * (block_out - self.out)
        self.lse = torch.logaddexp(self.lse, block_lse)


class RingStateSwapped(RingState):
    def update(self, block_out, block_lse):
        if self.out is None:
            self.out, self.lse = block_out, block_lse
            return
        self.lse = torch.logaddexp(self.lse, block_lse)
        weight = torch.sigmoid(block_lse - self.lse)[..., None]
        self.out = self.out + weight * (block_out - self.out)


def shard_attention(q, k, v, visible):
    """Local attention with its lse; rows that see nothing in this shard give 0 and NEVER."""
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).to(q.dtype) / q.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, NEVER)
        some = visible.any(-1, keepdim=True)
        lse = torch.logsumexp(scores, -1)
        weights = (scores - lse[..., None]).exp() * visible
        out = torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return out, torch.where(some[..., 0], lse, torch.full_like(lse, NEVER))
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("bhqk,bhkd->bhqd", (scores - lse[..., None]).exp(), v), lse


def ring_attention(q, k, v, attention_mask=None, causal=False, state=RingState):
    dtype = q.dtype
    up = torch.promote_types(dtype, torch.float32)
    ratio = q.shape[1] // k.shape[1]
    q, k, v = q.to(up), k.to(up).repeat_interleave(ratio, 1), v.to(up).repeat_interleave(ratio, 1)
    T, S = q.shape[2], k.shape[2]
    q_shards, k_shards, v_shards = q.split(SHARD, 2), k.split(SHARD, 2), v.split(SHARD, 2)
    world = len(k_shards)
    keep = None if attention_mask is None else attention_mask.bool()
    gathered = []
    for rank, q_local in enumerate(q_shards):
        q_pos = torch.arange(rank * SHARD, rank * SHARD + q_local.shape[2], device=q.device) + (S - T)
        ring = state()
        for step in range(world):
            source = (rank - step) % world
            first = source * SHARD
            k_pos = torch.arange(first, first + k_shards[source].shape[2], device=q.device)
            visible = None
            if causal:
                if first > int(q_pos[-1]):
                    continue  # this shard lies wholly in the future
                visible = (k_pos[None, :] <= q_pos[:, None])[None, None]
            if keep is not None:
                local = keep[:, None, None, first : first + len(k_pos)]
                visible = local.expand(-1, -1, len(q_pos), -1) if visible is None else visible & local
            ring.update(*shard_attention(q_local, k_shards[source], v_shards[source], visible))
        if ring.out is None:
            ring.out = q_local.new_zeros(*q_local.shape[:3], v.shape[-1])
        gathered.append(ring.out)
    return torch.cat(gathered, 2).to(dtype)


def make(name, state):
    def forward(model, q, k, v, attention_mask=None, causal=False):
        return ring_attention(q, k, v, attention_mask, causal, state)

    return Subject(
        kind="attention",
        name=name,
        forward=forward,
        mask_forms=("padding",),
        declares={
            "attention_scale": "1/sqrt(d_head)",
            "grouped_queries": True,
            "empty_row": "zeros",
            "causal_alignment": "bottom-right",
            "padding_side": "both",
            "half_precision": True,
            "memory": "linear",
        },
    )


right = make("ring", RingState)
wrong = make("ring-swapped", RingStateSwapped)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(4)

    def error(sub, t, s, causal, pad=None):
        q, k, v = torch.randn(2, 4, t, 8), torch.randn(2, 2, s, 8), torch.randn(2, 2, s, 8)
        keep = torch.ones(2, s, dtype=torch.bool)
        if pad:
            keep[1, pad] = False
        ok = keep[:, None, None]
        if causal:
            ok = ok & torch.ones(t, s, dtype=torch.bool).tril(s - t)
        kk, vv = k.double().repeat_interleave(2, 1), v.double().repeat_interleave(2, 1)
        w = F.softmax((q.double() @ kk.mT / 8**0.5).masked_fill(~ok, -float("inf")), -1).nan_to_num(0.0)
        got = sub.forward(None, q, k, v, keep if pad else None, causal)
        return (got.double() - w @ vv).abs().max().item()

    for t, s, pad in [(1, 1, None), (30, 64, slice(0, 3)), (64, 20, None), (100, 60, slice(10, None)), (12, 12, slice(0, 12))]:
        for causal in (False, True):
            assert error(right, t, s, causal, pad) < 2e-5
            assert error(wrong, t, s, causal, pad) < 2e-5
    for t, s, pad in [(65, 65, None), (20, 150, slice(0, 70)), (200, 200, slice(64, 128)), (130, 70, None)]:
        for causal in (False, True):
            assert error(right, t, s, causal, pad) < 2e-5
            assert error(wrong, t, s, causal, pad) > 0.02, (t, s)
    print("ok")
