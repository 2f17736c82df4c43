"""Writes the wrong files from the right ones."""
from pathlib import Path
H = Path(__file__).parent
D = {
"01_softmax_function": ("inner.sum(ctx.dim, keepdim=True)", "inner.sum(-1, keepdim=True)",
  "the backward sums grad * weights over the last axis whatever axis the softmax ran along, so gradients for dim != -1 are wrong"),
"02_softmax_lanes": ('(0, tail), value=float("-inf"))', "(0, tail))",
  "the rows are padded to whole vectors with 0 behind the subtraction of the maximum, so each padded lane adds exp(0) = 1 to the sum"),
"03_flash_tiles": ("max(0, min(S, end + shift)) if causal", "min(S, end) if causal",
  "the last key tile of a causal row of tiles is reckoned without the bottom-right shift S - T, so keys from `end` on are dropped when S > T"),
"04_split_kv": ("torch.exp(tops - best) * masses", "torch.exp(tops - best)",
  "splits are combined by exp of their maxima alone, not by their sums of exponentials, although the partial outputs are normalised"),
"05_gqa_backward": ("dk.reshape(B, G, R, *dk.shape[2:]).sum(2)", "dk.reshape(B, R, G, *dk.shape[2:]).sum(1)",
  "the keys' gradient is summed over heads g, g+G, ... where key head g served the heads g*R .. g*R+R-1 (values are right)"),
"06_int8_mlp": ("ctx.save_for_backward(levels.abs() <= QMAX)", "ctx.save_for_backward(w.abs() <= step)",
  "the straight-through range test compares weights with one quantisation step in place of 127 of them, so nearly no weight gets its gradient"),
"07_sink_window": ("return past & (near | first)", "return (past & near) | first",
  "sink tokens are or-ed in after the causal mask, so the first query sees the second token, which lies ahead of it"),
"08_alibi_baddbmm": ("self.beta = 1.0", "self.beta = self.inv_norm_factor",
  "baddbmm's beta is 1/sqrt(d_head) too, so ALiBi's bias is scaled along with the products and all slopes are too small by sqrt(d_head)"),
"09_folded_cross": ("encoder_padding_mask.repeat_interleave(self.num_heads, 0).unsqueeze(1)", "encoder_padding_mask.repeat(self.num_heads, 1).unsqueeze(1)",
  "the memory mask is tiled batch-minor (repeat) where heads are folded batch-major, so heads get the masks of other samples"),
"10_pooled_classifier": ("        scores = scores.masked_fill(~real, torch.finfo(scores.dtype).min)\n", "",
  "pooling weights are a softmax over padding too and only zeroed afterwards (the line below), not renormalised, so they sum to less than 1 when padded"),
"11_rotary_inplace": ("old = lo.clone()", "old = lo",
  "`old` is a view of x, not a copy, so the second half is rotated with the first half as already rotated"),
"12_t5_buckets": ("/ math.log(FAR / exact)", "/ math.log2(FAR / exact)",
  "natural logarithm over a logarithm to base 2: far buckets grow too slowly and the last ones are never reached at max_distance"),
"13_rmsnorm_backward": ("c1 = (xhat * wdy).mean", "c1 = (xhat * dy).mean",
  "the projection in the backward takes dy without the weight, right only while all weights are equal to 1"),
"14_llama_layer": ("self.feed_forward(self.ffn_norm(h))", "self.feed_forward(self.attention_norm(h))",
  "the feed-forward branch is normalised by attention_norm, ffn_norm is never used or trained"),
"15_packed_encoder": ("position_ids = index % T", "position_ids = torch.arange(len(index), device=index.device)",
  "positions run on through the packed row and do not start anew at each sample, so a sample's outputs depend on the lengths before it"),
"16_rotary_cache": ("        if layer == len(self.keys) - 1:\n            self.seen = k.shape[2]\n", "        self.seen = k.shape[2]\n",
  "the cache's token count is advanced by the first layer already, so later layers rotate a chunk by positions that are the chunk's length too high"),
"17_rolling_window": ("keep = min(WINDOW - 1, past[0].shape[2])", "keep = min(max(WINDOW - T, 0), past[0].shape[2])",
  "the past is cut to WINDOW - T keys before a chunk of T attends, so that its first queries lose keys inside their window (right for T = 1)"),
"18_topk_sampler": ("logits < v[:, -1:]", "logits < v[:, -1:].min()",
  "the top-k threshold is the least over the batch, so samples with higher k-th logits keep more than k tokens"),
"19_seq2seq_memo": ("            layer.cross.kv = None\n", "",
  "reset() forgets the cross-attention's kept keys and values: a second source of the same shape is decoded against the first one's memory"),
"20_fused_zloss": ("(1 + 2 * Z * lse)", "(1 + Z * lse)",
  "the backward's z-loss term lacks the factor 2 of the derivative of lse squared"),
}
for name, (old, new, what) in D.items():
    right = (H / f"{name}_right.py").read_text()
    assert right.count(old) == 1, name
    line = right[: right.index(old)].count("\n") + 2
    (H / f"{name}_wrong.py").write_text(f'WHAT = "{what} (line {line})"\n' + right.replace(old, new))
