"""The reference's tokenizers against the packages tokenizers and sentencepiece, trained on a text that we make."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from veriformer.properties.adapters.shared.made_text import made_text
from veriformer.reference.tokenization import BytePairEncoding, Unigram, WordPiece

TEXT = made_text(2000)
OTHER = [
    made_text(60, seed=1),
    "two  spaces, a\ttab\nand a line",
    "Grüße, 東京! \N{SMILING FACE WITH OPEN MOUTH} ½² ~~~ aaaaaaa  ",
    " ",
    "",
    "x" * 50,
]


@pytest.fixture(scope="module")
def byte_pairs() -> tuple[BytePairEncoding, Tokenizer]:
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\S+|\s+(?!\S)|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator([TEXT], trainer)
    return BytePairEncoding.train([TEXT], 600), theirs


def _merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def test_byte_pairs_are_learnt_as_by_tokenizers(byte_pairs: tuple[BytePairEncoding, Tokenizer]) -> None:
    ours, theirs = byte_pairs
    assert len(ours.merges) == 600 - 256
    assert ours.merges == _merges_of(theirs)
    assert ours.vocabulary == theirs.get_vocab()


@pytest.mark.parametrize("text", OTHER)
def test_byte_pairs_encode_as_tokenizers(text: str, byte_pairs: tuple[BytePairEncoding, Tokenizer]) -> None:
    ours, theirs = byte_pairs
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("text", OTHER)
def test_wordpiece_encodes_as_tokenizers(text: str) -> None:
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=200))  # type: ignore[call-arg]
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.train_from_iterator(
        [TEXT], trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    )
    ours = WordPiece(theirs.get_vocab())
    plain = text.replace("\N{SMILING FACE WITH OPEN MOUTH}", "").replace("~~~", "")  # symbols: other word rules
    assert ours.encode(plain) == theirs.encode(plain).ids


def _trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    sentences = iter([f"{sentence}." for sentence in TEXT.split(". ")])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=written, normalization_rule_name="identity", minloglevel=2,
        num_threads=1, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize("text", [made_text(60, seed=1), "aaaaaaaa", TEXT[:300]])
def test_unigram_segments_as_sentencepiece(text: str) -> None:
    theirs = _trained(model_type="unigram", vocab_size=200, remove_extra_whitespaces=False)
    pieces = {
        theirs.id_to_piece(i): theirs.get_score(i)
        for i in range(theirs.get_piece_size())
        if not theirs.is_control(i) and not theirs.is_unknown(i)
    }
    ours = Unigram(pieces)
    mine, yours = ours.segment(ours.SPACE + text.replace(" ", ours.SPACE)), theirs.encode(text, out_type=str)
    score = [sum(pieces[p] for p in segmented) for segmented in (mine, yours)]
    assert "".join(mine) == "".join(yours)
    assert math.isclose(*score, rel_tol=1e-6)  # the very pieces may differ only where two ways are equally probable


@pytest.mark.parametrize("text", [made_text(40, seed=2), "aaaaaaaa bbb"])
def test_unigram_encodes_as_tokenizers(text: str) -> None:
    ours = Unigram.train([TEXT], 300)
    theirs = Tokenizer(models.Unigram([*ours.log_p.items(), ("<unk>", -100.0)], unk_id=len(ours.log_p)))  # type: ignore[call-arg]
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_unigram_training_raises_the_likelihood() -> None:
    few, many = Unigram.train([TEXT], 80), Unigram.train([TEXT], 400)
    assert len(few.log_p) <= len(many.log_p)
    assert sum(math.exp(p) for p in many.log_p.values()) == pytest.approx(1)

    def likelihood(model: Unigram) -> float:
        return sum(model.log_p[p] for word in TEXT.split() for p in model.segment(model.SPACE + word))

    assert likelihood(many) > likelihood(few)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="half a surrogate pair at 1"):
        BytePairEncoding([]).encode("a\ud800")
    with pytest.raises(ValueError, match="at least 256"):
        BytePairEncoding.train(["a"], 10)
