"""What is said of tokenizers and of training objectives."""

from __future__ import annotations

import itertools
from collections import Counter

import torch

from veriformer.claims.claim import claim
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import generator
from veriformer.claims.systems import wordpieces
from veriformer.reference.config import Config
from veriformer.reference.model import build
from veriformer.reference.objectives import IGNORE, mask_tokens
from veriformer.reference.tokenization import BytePairEncoding, Unigram, WordPiece, count_pairs, merge

CORPUS = "low low low lower lower newest widest"


@claim(
    58,
    "MLM hides 15 % of the tokens, 80 % as the mask, 10 % as a random token, 10 % as they are; AR factorises the "
    "joint distribution.",
    "C 7",
    topic="tokens",
    formula=r"p(x_{1:T}) = \prod_t p(x_t \mid x_{<t})",
    derivation="The product of conditionals of a causal model is a distribution by the chain rule; the product of "
    "a masked model's conditionals is none. A random token is the old one once in V times, and is counted among the "
    "10 % here.",
)  # fmt: skip
def objectives(see: Evidence) -> None:
    see.properties(["masking.mlm"], ["reference:masking"])
    draw, special = generator(58), (0, 1, 2, 3, 4)
    tokens = torch.randint(5, 100, (400, 500), generator=draw)
    inputs, labels = mask_tokens(tokens, draw, mask_id=4, vocab_size=100, special_ids=special)
    chosen = labels != IGNORE
    see.written(
        "share of tokens that are to be foretold, of 200 000", chosen.double().mean().item(), least=0.147, most=0.153
    )
    see.written("of these, share of masks", (inputs[chosen] == 4).double().mean().item(), least=0.79, most=0.82)
    see.written(
        "of these, share that stays", (inputs[chosen] == tokens[chosen]).double().mean().item(), least=0.09, most=0.115
    )
    see.written(
        "sum of the probabilities of all sequences, causal model", _total("decoder"), least=1 - 1e-9, most=1 + 1e-9
    )
    see.written(
        "how far the same sum of a masked model's conditionals is from one", abs(_total("masked") - 1), least=1e-3
    )


def _total(kind: str, length: int = 4, vocab: int = 3) -> float:
    """Return the sum over all sequences of the product of a model's conditionals; token `vocab` begins, or hides."""
    model = (
        build(
            Config(
                architecture="decoder" if kind == "decoder" else "encoder", vocab_size=vocab + 1, d_model=8, num_heads=2
            ),
            generator(58),
        )
        .double()
        .eval()
    )
    sequences = torch.tensor(list(itertools.product(range(vocab), repeat=length)))
    logs = torch.zeros(len(sequences), dtype=torch.float64)
    with torch.no_grad():
        if kind == "decoder":
            begun = torch.cat([torch.full((len(sequences), 1), vocab), sequences[:, :-1]], dim=1)
            logits = model(begun)[..., :vocab]
            logs = logits.log_softmax(-1).gather(-1, sequences[..., None]).sum((1, 2))
        else:
            readout = torch.randn(8, vocab, generator=generator(59), dtype=torch.float64)
            for place in range(length):
                hidden = sequences.clone()
                hidden[:, place] = vocab
                logits = model(hidden)[:, place] @ readout
                logs += logits.log_softmax(-1).gather(-1, sequences[:, place, None]).sum(1)
    return logs.exp().sum().item()


@claim(
    59,
    "BPE merges the most frequent pair, in the example 'lo'+'w', 'low'+'er', 'new'+'est'; encoding applies the "
    "longest matching merges greedily.",
    "C 5.1",
    topic="tokens",
    derivation="A merge joins two symbols that exist. In the corpus of the example l-o and o-w both occur 5 times, "
    "so the first merge makes 'lo' or 'ow', not 'low'. Encoding replays the merges in the order learnt (Sennrich et "
    "al. 2016), which is not longest-match: that is WordPiece's rule.",
    corrected="BPE merges the most frequent adjacent pair of symbols; the example begins with l+o (tied with o+w), "
    "then lo+w; encoding replays the merges in the order in which they were learnt.",
    cites="Sennrich et al. 2016, algorithm 1.",
)  # fmt: skip
def byte_pairs(see: Evidence) -> None:
    words = Counter(tuple(word) for word in CORPUS.split())
    counts = count_pairs(words)
    trained = BytePairEncoding.train([CORPUS.replace(" ", "\n")], 256 + 6).merges
    see.show("first merges", ["+".join(pair) for pair in trained])
    see.written("merges before 'low' exists in the example", 1 + _first(trained, "low"), most=1)
    see.corrected("occurrences of l+o less those of o+w", counts["l", "o"] - counts["o", "w"], least=0, most=0)
    see.corrected(
        "occurrences of the most frequent other pair less those of l+o",
        max(n for p, n in counts.items() if p not in {("l", "o"), ("o", "w")}) - counts["l", "o"],
        most=-1,
    )
    see.corrected("merges before 'low' exists in the example", 1 + _first(trained, "low"), least=2, most=2)
    # merges learnt in this order: b+c, then a+b; 'abc' becomes a bc by order, ab c by the longest match from the left
    ordered = BytePairEncoding([("b", "c"), ("a", "b"), ("ab", "cd")])
    pieces = [{i: p for p, i in ordered.vocabulary.items()}[i] for i in ordered.encode("abc")]
    greedy = WordPiece({"[UNK]": 0, "ab": 1, "a": 2, "##bc": 3, "##c": 4}).pieces("abc")
    see.written(
        "'abc' is cut the same by the order of merges and by the longest match",
        int(pieces == [g.removeprefix("##") for g in greedy]),
        least=1,
    )
    see.corrected(
        "pieces of 'abc' by the order of merges are a, bc",
        pieces == merge(merge("abc", ("b", "c"), "bc"), ("a", "b"), "ab"),
    )
    see.properties(["tokenizer.bpe-merges"], ["reference:byte-pairs"], role="corrected")


def _first(merges: list[tuple[str, str]], piece: str) -> int:
    return next(i for i, pair in enumerate(merges) if "".join(pair) == piece)


@claim(
    60,
    "WordPiece merges the pair with the highest log P(xy) / (log P(x) + log P(y)), to maximise the likelihood of "
    "the corpus.",
    "C 5.2",
    topic="tokens",
    formula=r"\Delta\mathcal{L} \approx n_{xy}\,\log\frac{P(xy)}{P(x)\,P(y)}",
    derivation="Logarithms of probabilities are negative: the quotient is the larger the rarer the pair is beside its "
    "parts, so it picks the least associated pairs, and merging them lowers the likelihood. Merging replaces n_xy "
    "times P(x) P(y) by P(xy): to first order the log likelihood rises by n_xy log(P(xy) / (P(x) P(y))). The score "
    "P(xy) / (P(x) P(y)) that tutorials print is the rise for one occurrence; it picks pairs that occur once.",
    corrected="The pair whose merge raises the corpus's likelihood most, to first order the one with the highest "
    "n_xy log(P(xy) / (P(x) P(y))).",
    cites="Schuster & Nakajima 2012, section 3; Wu et al. 2016, section 4.1.",
)  # fmt: skip
def word_pieces(see: Evidence) -> None:
    words = [*("the thin thing the that there hug hug pug pun bun hugs " * 5).split(), "xylophone", "quiz"]
    every = {pair for word in words for pair in itertools.pairwise(word)}
    before = wordpieces.likelihood(words)
    rises = {pair: wordpieces.likelihood(words, pair) - before for pair in every}
    most = max(rises.values())
    first = {
        "likelihood": max(sorted(every), key=rises.__getitem__),
        **{name: wordpieces.merges(words, 1, score)[0] for name, score in wordpieces.SCORES.items()},
    }
    see.show("first merge by", {name: "+".join(pair) for name, pair in first.items()})
    see.show("rise of the log likelihood by it, nats", {name: round(rises[pair], 3) for name, pair in first.items()})
    see.written(
        "rise of the log likelihood by the merge that the notes' score picks, over the largest rise",
        rises[first["notes"]] / most,
        least=1 - 1e-12,
    )
    see.corrected(
        "the same of the score n log(P(xy) / (P(x) P(y)))", rises[first["whole corpus"]] / most, least=1 - 1e-12
    )
    see.corrected("the same of the notes' score: it falls", rises[first["notes"]], most=-1e-3)
    see.corrected("the same of P(xy) / (P(x) P(y)), the rise of one occurrence", rises[first["each"]] / most, most=0.5)
    see.properties(["tokenizer.wordpiece"], ["reference:wordpiece"], role="corrected")


@claim(
    61,
    "SentencePiece's unigram model is reversible, whitespace included; with subwords there is no true "
    "out-of-vocabulary.",
    "C 5.3",
    topic="tokens",
    derivation="Pieces with the space written as a letter of its own join to the text again, as long as every "
    "letter is a piece. A letter that training never saw is no piece: it is unknown, and lost, unless bytes are "
    "pieces. (The program SentencePiece first folds characters by NFKC and runs of spaces into one, unless told not "
    "to: then the folded text comes back.)",
    condition="every character of the text is a piece, or bytes are (byte fallback)",
)  # fmt: skip
def reversible(see: Evidence) -> None:
    model = Unigram.train([CORPUS] * 3, 30)
    known, strange = "low  newest wider  low", "low \N{GREEK SMALL LETTER OMEGA} zoo"
    see.restricted(
        "a text of known letters, two spaces included, comes back", model.decode(model.encode(known)) == known
    )
    see.written(
        "unknown pieces in a text with letters that training never saw",
        model.encode(strange).count(model.unknown),
        most=0,
    )
    of_bytes = BytePairEncoding.train([CORPUS], 270)
    see.restricted(
        "the same text comes back from pieces of bytes", of_bytes.decode(of_bytes.encode(strange)) == strange
    )
    see.properties(
        ["tokenizer.round-trip", "tokenizer.unigram", "tokenizer.no-unknown"],
        ["reference:unigram", "reference:byte-pairs"],
        role="restricted",
    )
