"""What is said of how layers are put together: dropout, biases of positions, the block, encoder and decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import gap, generator, normal
from veriformer.reference.attention import attention
from veriformer.reference.blocks import EncoderLayer
from veriformer.reference.config import Config
from veriformer.reference.model import Decoder, build
from veriformer.reference.position_bias import NoBias


@claim(
    44,
    "Dropout stands at five places: on attention weights, after attention, inside and after the feed-forward "
    "network, after the embedding.",
    "A 9.2",
    topic="training",
    derivation="Counted in the reference, where each is a module of its own: 4 N + 1 that act, and a model of N "
    "layers in which each alone changes the output. (The original Transformer has three of them: after either "
    "sublayer and after the embedding.)",
)  # fmt: skip
def dropout(see: Evidence) -> None:
    model = build(Config(num_layers=2, dropout=0.5), generator(44)).train()
    tokens, places = torch.arange(12)[None], [m for m in model.modules() if isinstance(m, nn.Dropout)]
    see.written("dropouts that can act in an encoder of 2 layers", len(places), least=9, most=9)
    changing = 0
    for place in places:
        for other in places:
            other.p = 0.0
        plain, place.p = model(tokens), 0.5
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(44)
            changing += gap(model(tokens), plain) > 1e-6
    see.written("of them, how many alone change the output", changing, least=9, most=9)
    see.properties(["dropout.places"], ["reference:encoder", "reference:decoder-gpt2"])


@claim(
    53,
    "Relative biases must enter at every layer.",
    "E 4.3",
    topic="positions",
    derivation="An absolute encoding is in the stream and reaches every later layer; a bias is not, so a layer "
    "without one weighs its inputs regardless of where they stand. But one biased layer already makes outputs "
    "depend on order, and what it wrote into the stream reaches the layers after it.",
    corrected="A layer without a bias is equivariant to the order of its inputs; one layer with a bias is enough "
    "for a model to tell orders apart.",
    cites="Shaw et al. 2018 and Raffel et al. 2020 add it in every layer, by choice.",
)  # fmt: skip
def bias_everywhere(see: Evidence) -> None:
    draw = generator(53)
    model = build(Config(positions="t5", num_layers=3, d_model=16, num_buckets=8), draw).double().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.2 * normal(draw, *parameter.shape)
    x, order = normal(draw, 1, 6, 16), torch.randperm(6, generator=draw)
    for layer in model.stack.layers[1:]:  # type: ignore[union-attr, index]
        layer.attention.position_bias = NoBias()
    with torch.no_grad():
        told = gap(model(embeddings=x)[:, order], model(embeddings=x[:, order]))
        later: nn.Module = model.stack.layers[1]  # type: ignore[union-attr, index, assignment]
        alone = gap(later(x)[0][:, order], later(x[:, order])[0])
    see.written("difference that an order makes with the bias in the first of 3 layers alone", told, most=1e-9)
    see.corrected("difference that an order makes with the bias in the first of 3 layers alone", told, least=1e-3)
    see.corrected("difference that an order makes to a layer without a bias", alone, most=1e-12)


@claim(
    56,
    "The block is t1 = LayerNorm(x_i), t2 = MHA(x_i, ...), t3 = t2 + x_i, ...",
    "B Transformer",
    topic="architectures",
    derivation="As written t1 is used nowhere: attention reads the stream itself, and the first norm's gain and "
    "bias have no effect. The pre-LN block has t2 = MHA(t1, ...), over the norms of all earlier positions. (The list "
    "[x_1, ..., x_{i-1}] leaves out x_i itself, which the sum over j <= i in the same notes has.)",
    corrected="t2 = MHA(t1, ...).",
    cites="Xiong et al. 2020, figure 1.",
)  # fmt: skip
def unused_norm(see: Evidence) -> None:
    draw = generator(56)
    layer, x = EncoderLayer(Config(d_model=12, num_heads=3), causal=True).double(), normal(draw, 2, 5, 12)
    gain = layer.around_attention.norm_in.weight

    def block(into_attention: Tensor) -> Tensor:
        t3 = layer.attention(into_attention)[0] + x
        return layer.feed_forward(layer.around_feed_forward.enter(t3)) + t3

    t1 = layer.around_attention.enter(x)
    as_written = torch.autograd.grad(block(x).square().sum(), gain, allow_unused=True)[0]  # type: ignore[arg-type]
    see.written(
        "largest gradient of the first norm's gain",
        0.0 if as_written is None else as_written.abs().max().item(),
        least=1e-9,
    )
    corrected = torch.autograd.grad(block(t1).square().sum(), gain)[0]  # type: ignore[arg-type]
    see.corrected(
        "largest gradient of the first norm's gain with t2 = MHA(t1)", corrected.abs().max().item(), least=1e-9
    )
    see.corrected("largest difference to the pre-LN layer of the reference", gap(block(t1), layer(x)[0]), most=1e-13)


@claim(
    69,
    "The causal mask is the only structural difference between an encoder and a decoder-only model.",
    "A 7",
    topic="architectures",
    derivation="Layer for layer they are the same modules. A decoder-only model has an output projection to the "
    "vocabulary besides.",
    condition="the stack is meant; the projection to the vocabulary is left aside",
)  # fmt: skip
def only_the_mask(see: Evidence) -> None:
    draw = generator(69)
    encoder, decoder = (
        build(Config(architecture=a, vocab_size=9, d_model=16), draw).double().eval() for a in ("encoder", "decoder")
    )
    missing = decoder.load_state_dict(encoder.state_dict(), strict=False).missing_keys
    tokens = torch.randint(9, (2, 7), generator=draw)
    with torch.no_grad():
        x = encoder.embedding(tokens, None, torch.arange(7).expand(2, -1))  # type: ignore[operator]
        hidden = x
        for layer in encoder.stack.layers:  # type: ignore[union-attr]
            hidden = layer(hidden, torch.ones(7, 7).tril().bool())[0]
        hidden = encoder.stack.final_norm(hidden)  # type: ignore[union-attr, operator]
        logits = decoder(tokens)
    assert isinstance(decoder, Decoder)
    see.written("parameters that the decoder has and the encoder has not", len(missing), most=0)
    see.restricted(
        "the same, the output projection left aside", len([m for m in missing if not m.startswith("output")]), most=0
    )
    see.restricted(
        "largest difference of the decoder's logits to the masked encoder's, projected",
        gap(decoder.output(hidden), logits),
        most=1e-12,
    )


@claim(
    68,
    "An encoder keeps the number of tokens and the width.",
    "E 5.2",
    topic="architectures",
    derivation="Attention gives one output a query, and x + f(x) asks f for the shape of x.",
)  # fmt: skip
def shapes(see: Evidence) -> None:
    wrong = 0
    for length, width, depth in ((1, 8, 1), (7, 16, 3), (40, 24, 2)):
        model = build(Config(vocab_size=5, d_model=width, num_layers=depth, max_len=40), generator(68))
        wrong += model(torch.zeros(2, length, dtype=torch.long)).shape != (2, length, width)
    see.written("encoders of three sizes whose output has another shape than [B, T, d_model]", wrong, most=0)
    values = normal(generator(1), 1, 1, 4, 5)
    query, key = (normal(generator(s), 1, 1, 4, 2) for s in (2, 3))
    mixed = attention(query, key, values)[0]
    see.written(
        "attention alone keeps the number of tokens: outputs less queries", mixed.shape[-2] - 4, least=0, most=0
    )
    see.written("and takes the width of its values, which x + f(x) asks to be x's", mixed.shape[-1], least=5, most=5)
