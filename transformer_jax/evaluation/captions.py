"""Scores of captions against several references: BLEU-1 to 4 and CIDEr-D."""

from __future__ import annotations

import collections
import math
import unicodedata
from collections.abc import Iterator, Sequence

from sacrebleu.metrics import BLEU

_ORDERS = 4
# Standard deviation of the penalty for a difference in length, in words.
_SIGMA = 6.0

Counts = collections.Counter[tuple[str, ...]]


def words_of(caption: str) -> list[str]:
    """Return the words of a caption in lowercase, without punctuation around them."""
    words = (_strip_punctuation(word) for word in caption.lower().split())
    return [word for word in words if word]


def _strip_punctuation(word: str) -> str:
    """Remove the punctuation and symbols at both ends of a word."""
    kept = [n for n, character in enumerate(word) if unicodedata.category(character)[0] not in "PS"]
    return word[kept[0] : kept[-1] + 1] if kept else ""


def caption_scores(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> Iterator[tuple[str, float]]:
    """Compute the scores of captions.

    Args:
      hypotheses: A caption for each image.
      references: One or more references for each image.

    Yields:
      (name, value): `bleu1` to `bleu4`, 0 to 100, without smoothing and with the closest reference's length;
      and `cider`, see `cider_d`.

    Raises:
      ValueError: The numbers of captions and references differ, or an image has no reference.
    """
    if len(hypotheses) != len(references) or not all(references):
        raise ValueError(f"{len(hypotheses)} captions for {len(references)} images with references")
    captions = [" ".join(words_of(text)) for text in hypotheses]
    count = max(map(len, references))
    # sacreBLEU takes streams of references; an image with fewer of them has None in the last ones.
    streams = [
        [" ".join(words_of(texts[n])) if n < len(texts) else None for texts in references] for n in range(count)
    ]
    for order in range(1, _ORDERS + 1):
        bleu = BLEU(max_ngram_order=order, tokenize="none", smooth_method="none", force=True)
        yield f"bleu{order}", bleu.corpus_score(captions, streams).score  # type: ignore[arg-type]
    yield "cider", cider_d(hypotheses, references)


def cider_d(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Compute CIDEr-D (Vedantam et al. 2015, sections 3 and 8), averaged over the images.

    N-grams of one to four words are weighted by how rare they are among the images' references. The score of an
    image is the mean over orders and references of the cosine similarity, with counts clipped to those of the
    reference and a Gaussian penalty for the difference in length, times 10.

    Args:
      hypotheses: A caption for each image.
      references: One or more references for each image.
    """
    tokenized = [[words_of(text) for text in texts] for texts in references]
    document_frequencies: list[Counts] = [collections.Counter() for _ in range(_ORDERS)]
    for texts in tokenized:
        for order in range(_ORDERS):
            document_frequencies[order].update({gram for words in texts for gram in _grams(words, order + 1)})
    log_images = math.log(max(len(references), 1))
    total = 0.0
    for hypothesis, texts in zip(hypotheses, tokenized, strict=True):
        words = words_of(hypothesis)
        for order, frequencies in enumerate(document_frequencies):
            vector = _weighted(words, order + 1, frequencies, log_images)
            for reference in texts:
                reference_vector = _weighted(reference, order + 1, frequencies, log_images)
                penalty = math.exp(-((len(words) - len(reference)) ** 2) / (2 * _SIGMA**2))
                total += 10 * penalty * _clipped_cosine(vector, reference_vector) / (_ORDERS * len(texts))
    return total / max(len(hypotheses), 1)


def _grams(words: Sequence[str], order: int) -> Counts:
    return collections.Counter(tuple(words[n : n + order]) for n in range(len(words) - order + 1))


def _weighted(
    words: Sequence[str], order: int, frequencies: Counts, log_images: float
) -> dict[tuple[str, ...], float]:
    """Return the TF-IDF weight of each n-gram: its count times log(images / images that contain it)."""
    return {
        gram: count * (log_images - math.log(max(1, frequencies[gram])))
        for gram, count in _grams(words, order).items()
    }


def _clipped_cosine(vector: dict[tuple[str, ...], float], reference: dict[tuple[str, ...], float]) -> float:
    product = sum(
        min(value, reference.get(gram, 0.0)) * reference.get(gram, 0.0) for gram, value in vector.items()
    )
    norms = [math.sqrt(sum(value**2 for value in v.values())) for v in (vector, reference)]
    return product / (norms[0] * norms[1]) if all(norms) else 0.0
