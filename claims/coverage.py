"""Every system that the notes name: where it lives, and the claims and tests that run it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        name: as the notes have it.
        cited: letter and section.
        where: module and name of the object, under `veriformer`; empty where it is not here.
        claims: numbers of the claims that run it.
        why_not: why it is not here.
    """

    name: str
    cited: str
    where: str
    claims: tuple[int, ...] = ()
    why_not: str = ""

    @property
    def file(self) -> str:
        """In which it lives, from the repository's root; empty where it is not here."""
        return self.where.partition(":")[0].replace(".", "/") + ".py" if self.where else ""

    @property
    def test(self) -> str:
        """That runs it: every system is run by one test, through the claims."""
        return "tests/claims/test_entries.py::test_every_system_is_run" if self.where else ""


SYSTEMS = (
    System("sinusoidal positions", "A 3.2", "reference.positions:sinusoidal", (1, 2, 3, 4, 5, 6)),
    System("learned positions", "A 3.3", "reference.positions:LearnedPositions", (7, 8)),
    System("scalar and one-hot positions", "E 4.2.1", "claims.systems.positions:scalar", (2,)),
    System("embedding scale", "A 3.4", "reference.model:Embedding", (9,)),
    System("scaled dot-product attention", "A 4.1", "reference.attention:attention", (13, 15, 17)),
    System("d_v other than d_k", "D 3.1", "reference.attention:attention", (55,)),
    System("multi-head attention", "A 4.1", "reference.attention:MultiHeadAttention", (10, 46, 48)),
    System("causal mask", "A 6.1", "reference.attention:causal_allowed", (16, 69)),
    System("hard attention", "E 2.3", "reference.attention:softmax", (47,)),
    System("feed-forward network, ReLU and GELU", "A 4.2", "reference.feedforward:FeedForward", (18, 28, 29)),
    System("SwiGLU", "A 4.2", "reference.feedforward:GatedFeedForward", (18,)),
    System("residual connection", "A 4.3", "reference.blocks:Skip", (25, 49, 50)),
    System("LayerNorm", "A 4.4", "reference.normalization:LayerNorm", (19, 20, 57)),
    System("BatchNorm, as what LayerNorm is not", "A 4.4", "claims.entries.norms:batches", (19,)),
    System("post-LN and pre-LN", "A 4.5", "reference.blocks:Sublayer", (21, 22, 23)),
    System("closing norm as a switch", "A 4.5", "ablations.trials.edits:EDITS", (24,)),
    System("encoder", "A 5", "reference.model:Encoder", (35, 68)),
    System("decoder layer with cross-attention", "A 6", "reference.blocks:DecoderLayer", (36,)),
    System("decoder-only model", "A 7", "reference.model:Decoder", (58, 69)),
    System("encoder-decoder", "A 7", "reference.model:EncoderDecoder", (37,)),
    System("parameter counts", "A 8.1", "reference.counting:count_parameters", (35, 37)),
    System("FLOPs and memory", "A 8.2", "reference.counting:count_flops", (38, 39)),
    System("the notebook's profile", "A 14", "claims.entries.sizes:profile", (40,)),
    System("scaling law", "A 8.3", "ablations.statistics.fits:fit_power", (41,)),
    System("warm-up schedule", "A 9.1", "reference.schedules:noam", (42,)),
    System("Adam's first steps", "B", "claims.entries.training:adam", (67,)),
    System("dropout at five places", "A 9.2", "reference.blocks:Sublayer", (44,)),
    System("DropPath", "C", "reference.blocks:DropPath", (66,)),
    System("initialisations: Xavier, GPT-2, torch's", "A 9.3", "reference.initialization:INITS", (43, 45)),
    System("pooling: class token, mean, maximum, weighted", "A 10", "reference.pooling:POOLINGS", (34,)),
    System("attention entropy", "A 11", "ablations.training.observation:attention_entropy", (33,)),
    System("class and register tokens", "E 6", "reference.model:Classifier", (62,)),
    System("multi-view classifier", "E 7", "reference.views:MultiViewClassifier", (63,)),
    System("rotary positions", "C 4.3", "reference.rotary:Rotary", (51,)),
    System("ALiBi", "E 4.3", "reference.position_bias:AlibiBias", (52,)),
    System("trained relative bias", "E 4.3", "reference.position_bias:T5Bias", (53,)),
    System("byte pair encoding", "C 5.1", "reference.tokenization:BytePairEncoding", (59,)),
    System("WordPiece: encoding", "C 5.2", "reference.tokenization:WordPiece", (60,)),
    System("WordPiece: training, by three scores", "C 5.2", "claims.systems.wordpieces:merges", (60,)),
    System("unigram tokenizer, without bytes", "C 5.3", "reference.tokenization:Unigram", (61,)),
    System("masked language modelling", "C 7", "reference.objectives:mask_tokens", (58,)),
    System("label smoothing", "A 14", "reference.objectives:cross_entropy", (30,)),
    System("gradient clipping", "C", "ablations.trials.recipe:Recipe", (65,)),
    System("mixed precision", "C", "ablations.trials.recipe:Recipe", (64,)),
    System("convolution and long convolution", "E 1", "claims.systems.convolutions:long_convolution", (71,)),
    System("non-local model", "E 1.4", "claims.systems.convolutions:non_local", (71,)),
    System("modern Hopfield network", "C 8.1", "claims.systems.associative:update", (54,)),
    System("residual stream of heads", "E 3.2", "claims.entries.blocks:residual_stream", (49,)),
    System("residual branches over sqrt(2N), over sqrt(L)", "C", "claims.entries.blocks:residual_scaling", (45,)),
    System("orthogonal initialisation", "C", "claims.systems.initialisations:orthogonal", (45,)),
    System("sparse and linear attention, state-space models", "C 8", "", why_not="named as remedies, without a "
                                                                                 "statement"),
)  # fmt: skip
"""In the order of the notes."""
