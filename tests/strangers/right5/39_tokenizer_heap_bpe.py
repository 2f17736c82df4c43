WHAT = "byte-level BPE that merges by a heap over a linked list (lowest rank, then leftmost) with a cache of words, specials split off first; ids of merges begin behind the bytes and the special"
import heapq
import re
from collections import Counter

WORD = re.compile(r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+")
SPECIAL = {"<|end|>": 256}
TEXTS = ["the theme of the thesis is there in the other theatre", "low lower lowest, slow slower slowest",
         "aaaa aaab aabb abab abba banana bandana", "über Öl, naïve café, 日本 日本語", "a  b   c\n\nd\te"]


class Tokenizer:
    def __init__(self, merges):
        self.pairs = [tuple(p) for p in merges]
        self.rank = {p: i for i, p in enumerate(self.pairs)}
        self.piece = {chr(i): i for i in range(256)}  # a byte is the character of its number
        for a, b in self.pairs:
            self.piece.setdefault(a + b, len(self.piece) + 1)  # 256 is the special
        self.text = {i: p for p, i in self.piece.items()}
        self.special = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")
        self.known = {}

    @classmethod
    def train(cls, texts, vocab_size):
        words = Counter(w for t in texts for w in WORD.findall(t))
        split = {w: [chr(b) for b in w.encode()] for w in words}
        merges, made = [], 257
        pieces = {chr(i) for i in range(256)}
        while made < vocab_size:
            seen = Counter()
            for w, n in words.items():
                for pair in zip(split[w], split[w][1:]):
                    seen[pair] += n
            if not seen:
                break
            best = max(seen, key=lambda p: (seen[p], p))
            merges.append(best)
            made += best[0] + best[1] not in pieces
            pieces.add(best[0] + best[1])
            for w, s in split.items():
                out, i = [], 0
                while i < len(s):
                    if s[i : i + 2] == list(best):
                        out.append(s[i] + s[i + 1])
                        i += 2
                    else:
                        out.append(s[i])
                        i += 1
                split[w] = out
        return cls(merges)

    def cut(self, word):
        if word not in self.known:
            part = [chr(b) for b in word.encode()]
            after, before = list(range(1, len(part) + 1)), list(range(-1, len(part) - 1))
            heap = []

            def offer(i):
                j = after[i]
                if j < len(part) and (part[i], part[j]) in self.rank:
                    heapq.heappush(heap, (self.rank[part[i], part[j]], i, part[i], part[j]))

            for i in range(len(part)):
                offer(i)
            while heap:
                _, i, a, b = heapq.heappop(heap)
                j = after[i]
                if part[i] != a or j >= len(part) or part[j] != b:
                    continue  # one of them has gone into another
                part[i], part[j] = a + b, None
                after[i] = after[j]
                if after[j] < len(part):
                    before[after[j]] = i
                if before[i] >= 0:
                    offer(before[i])
                offer(i)
            self.known[word] = tuple(p for p in part if p is not None)
        return self.known[word]

    def encode(self, text):
        ids = []
        for part in self.special.split(text):
            if part in SPECIAL:
                ids.append(SPECIAL[part])
            else:
                ids += [self.piece[p] for w in WORD.findall(part) for p in self.cut(w)]
        return ids

    def decode(self, ids):
        name = {i: s for s, i in SPECIAL.items()}
        return b"".join(name[i].encode() if i in name else self.text[i].encode("latin-1") for i in ids).decode(errors="replace")


from veriformer.properties import Subject


def build(c):
    return Tokenizer.train(TEXTS, 320)


def forward(model, text):
    return model.encode(text)


def decode(model, ids):
    return model.decode(ids)


def words(model, text):
    return [[chr(b) for b in w.encode()] for w in WORD.findall(text)]


undeclared = Subject(kind="tokenizer", build=build, forward=forward)
declared = Subject(
    kind="tokenizer", name="heap bpe", build=build, forward=forward, decode=decode, train=Tokenizer.train, words=words,
    vocabulary=lambda m: {**m.piece, **SPECIAL}, merges=lambda m: list(m.pairs),
    declares={"algorithm": "bpe", "byte_level": True, "reversible": True, "specials": SPECIAL},
)
