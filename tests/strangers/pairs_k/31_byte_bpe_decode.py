"""A byte-level BPE tokenizer, trained on a few sentences."""

from collections import Counter

from veriformer.properties import Subject

WHAT = "decode() decodes each token by itself: a character whose bytes lie in several tokens becomes U+FFFD."
CAUSE = (
    "Characters of several bytes are lost in decoding: the bytes of each token are decoded by themselves (errors='replace') "
    "instead of being joined first."
)
CORPUS = (
    "the model reads the text and writes the text again. le café est fermé, la forêt est très près. "
    "über größere Dächer fällt schöner Schnee. the attention of the model is on the token before the token. "
) * 2


def pair_up(ids, pair, new):
    out, i = [], 0
    while i < len(ids):
        if i + 1 < len(ids) and (ids[i], ids[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def trained(text, count):
    ids, ranks, pieces = list(text.encode()), {}, {i: bytes([i]) for i in range(256)}
    for step in range(count):
        pair, often = Counter(zip(ids, ids[1:])).most_common(1)[0]
        if often < 2:
            break
        new = 256 + step
        ranks[pair], pieces[new] = new, pieces[pair[0]] + pieces[pair[1]]
        ids = pair_up(ids, pair, new)
    return ranks, pieces


RANKS, PIECES = trained(CORPUS, 60)


def make(join):
    class ByteBPE:
        def __init__(self):
            self.ranks, self.pieces = RANKS, PIECES

        def encode(self, text):
            ids = list(text.encode("utf-8"))
            while len(ids) > 1:
                best = min(zip(ids, ids[1:]), key=lambda pair: self.ranks.get(pair, float("inf")))
                if best not in self.ranks:
                    break
                ids = pair_up(ids, best, self.ranks[best])
            return ids

        def decode(self, ids):
            return join([self.pieces[int(i)] for i in ids])

    return ByteBPE


def subject(join):
    tokenizer = make(join)
    return Subject(
        kind="tokenizer",
        name="byte-level BPE",
        build=lambda c: tokenizer(),
        forward=lambda m, text: m.encode(text),
        decode=lambda m, ids: m.decode(ids),
        declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
    )


right = subject(lambda pieces: b"".join(pieces).decode("utf-8", errors="replace"))
wrong = subject(lambda pieces: "".join(piece.decode("utf-8", errors="replace") for piece in pieces))
