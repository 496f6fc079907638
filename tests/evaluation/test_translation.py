import pytest

from transformer_jax.evaluation.translation import bleu_signature, bleu_tokenizer_for, translation_scores

HYPOTHESES = ["the cat sat on the mat .", "a dog runs fast today"]
REFERENCES = ["the cat sat on the mat .", "a dog runs very fast today"]


def test_scores_by_hand():
    scores = dict(translation_scores(HYPOTHESES, REFERENCES, bleu_tokenize="none"))
    # Matches are 7 + 5 of 12 unigrams, 6 + 3 of 10 bigrams, 5 + 1 of 8 trigrams and 4 + 0 of 6 4-grams; the
    # references have 13 words.
    import math

    precision = math.exp(sum(map(math.log, (12 / 12, 9 / 10, 6 / 8, 4 / 6))) / 4)
    assert scores["bleu"] == pytest.approx(100 * precision * math.exp(1 - 13 / 12), rel=1e-6)
    assert scores["exact_match"] == 50.0
    assert 0 < scores["chrf"] < 100


def test_perfect_and_empty():
    assert dict(translation_scores(REFERENCES, REFERENCES))["bleu"] == pytest.approx(100)
    assert dict(translation_scores(["", ""], REFERENCES))["bleu"] == 0


def test_the_signature_names_the_tokenizer():
    assert "tok:none" in bleu_signature(REFERENCES, "none")
    assert "tok:13a" in bleu_signature(REFERENCES, "13a")


def test_unequal_lengths():
    with pytest.raises(ValueError, match="1 hypotheses for 2 references"):
        list(translation_scores(["a"], REFERENCES))


@pytest.mark.parametrize(
    ("text", "tokenizers"),
    [
        ("2027年4月21日水曜日に東京で", {"ja-mecab", "char"}), ("三小时前在北京", {"zh"}),
        ("3시간 전 서울", {"ko-mecab", "char"}), ("วันพุธที่", {"char"}), ("Mittwoch, 21. April", {"13a"}),
        ("среда в Москве", {"13a"}), ("The sign says 東京.", {"13a"}), ("12:30", {"13a"}),
    ],
)  # fmt: skip
def test_the_tokenizer_of_bleu_follows_the_language(text, tokenizers):
    assert bleu_tokenizer_for([text, ""]) in tokenizers
    assert f"tok:{bleu_tokenizer_for([text])}" in bleu_signature([text])


def test_japanese_is_not_scored_as_one_word_per_sentence():
    references = ["2027年4月21日水曜日", "東京都とパリ", "3時間前", "明日の午後5時"]
    hypotheses = ["2027年4月21日木曜日", "東京都とローマ", "3時間前", "明日の午後6時"]
    scores = dict(translation_scores(hypotheses, references, bleu_tokenize="char"))
    assert scores["bleu"] == pytest.approx(69.59, abs=0.01)  # the value of sacreBLEU 2.6
    assert dict(translation_scores(hypotheses, references))["bleu"] > 50
