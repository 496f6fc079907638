import pytest

from transformer_jax.evaluation.translation import bleu_signature, translation_scores

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
