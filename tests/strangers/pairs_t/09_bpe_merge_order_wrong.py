WHAT = "the leftmost pair that has a merge is joined first, not the one that was learnt first (line 75)"

"""A byte-level BPE tokenizer: trained on a little text, encodes by rank of merges, decodes to the letter."""

from veriformer.properties import Subject

CORPUS = [
    "the lower the newer the wider the newest lowest widest of the towers",
    "she sells sea shells by the sea shore, the shells she sells are sea shells",
    "attention is all you need, and attention over attention needs all of it",
    "hers and theirs, there and here; in other weather the other theory withers",
]


def byte_letters():
    """A printable letter for every byte, as GPT-2 has it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    return letters


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def segment(text):
    """Words with the space before them; nothing is lost."""
    words, word = [], ""
    for character in text:
        if word and (character == " " or character.isalnum() != word[-1].isalnum()) and word != " ":
            words.append(word)
            word = ""
        word += character
    return [*words, word] if word else words


def symbols(word):
    return [LETTERS[byte] for byte in word.encode("utf-8")]


def join(parts, pair):
    """Every occurrence of a pair becomes one piece, from the left."""
    out, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and (parts[i], parts[i + 1]) == pair:
            out.append(parts[i] + parts[i + 1])
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


class Tokenizer:
    def __init__(self, merges):
        self.merges = list(merges)
        self.ranks = {pair: rank for rank, pair in enumerate(self.merges)}
        self.pieces = [LETTERS[byte] for byte in range(256)] + [a + b for a, b in self.merges]
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}

    def encode(self, text):
        return [self.ids[piece] for word in segment(text) for piece in self.split(symbols(word))]

    def split(self, parts):
        while len(parts) > 1:
            known = [pair for pair in zip(parts, parts[1:]) if pair in self.ranks]
            if not known:
                break
            parts = join(parts, known[0])
        return parts

    def decode(self, ids):
        return bytes(BYTES[letter] for index in ids for letter in self.pieces[index]).decode("utf-8", errors="replace")


def train(texts, vocab_size):
    """The most frequent pair of neighbours becomes a piece, until there are enough or none comes twice."""
    counts = {}
    for text in texts:
        for word in segment(text):
            counts[word] = counts.get(word, 0) + 1
    words = {word: symbols(word) for word in counts}
    merges, known = [], set(LETTERS.values())
    while 256 + len(merges) < vocab_size:
        pairs = {}
        for word, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] = pairs.get(pair, 0) + counts[word]
        pairs = {pair: count for pair, count in pairs.items() if count > 1 and pair[0] + pair[1] not in known}
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        known.add(best[0] + best[1])
        words = {word: join(parts, best) for word, parts in words.items()}
    return Tokenizer(merges)


subject = Subject(
    kind="tokenizer",
    name="byte-level bpe",
    build=lambda c: train(CORPUS, 256 + 60),
    forward=lambda model, text: model.encode(text),
    decode=lambda model, ids: model.decode(ids),
    train=train,
    words=lambda model, text: [symbols(word) for word in segment(text)],
    vocabulary=lambda model: dict(model.ids),
    merges=lambda model: list(model.merges),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True},
)
