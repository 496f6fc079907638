"""Scores of translations, by sacreBLEU (Post 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sacrebleu.metrics import BLEU, CHRF

BLEU_TOKENIZERS = tuple(BLEU.TOKENIZERS)


def check_bleu_tokenizer(name: str) -> None:
    """Check that a tokenizer of sacreBLEU is known and its requirements are installed.

    Raises:
      ValueError: sacreBLEU has no tokenizer of this name.
    """
    if name not in BLEU_TOKENIZERS:
        raise ValueError(f"unknown BLEU tokenizer {name!r}: choose one of {', '.join(BLEU_TOKENIZERS)}")
    try:
        BLEU(tokenize=name)
    except (RuntimeError, ImportError, OSError) as error:
        raise ValueError(f"BLEU tokenizer {name!r} cannot be used: {' '.join(str(error).split())}") from None


def bleu_signature(references: Sequence[str], tokenize: str) -> str:
    """Return sacreBLEU's signature, which lists all settings of the BLEU score."""
    bleu = BLEU(tokenize=tokenize)
    bleu.corpus_score(references, [references])
    return str(bleu.get_signature())


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokenize: str = "13a"
) -> Iterator[tuple[str, float]]:
    """Yield ("bleu", 0 to 100), ("chrf", 0 to 100) and ("exact_match", percent of equal sentences).

    Args:
      hypotheses: Translations.
      references: A reference for each translation.
      bleu_tokenize: sacreBLEU's tokenizer; "none" for text that is already tokenized.

    Raises:
      ValueError: The numbers of hypotheses and references differ.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    # `force` silences sacreBLEU's warning about tokenized periods, which tokenized text has.
    bleu = BLEU(tokenize=bleu_tokenize, force=True)
    yield "bleu", bleu.corpus_score(hypotheses, [references]).score
    yield "chrf", CHRF().corpus_score(hypotheses, [references]).score
    equal = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    yield "exact_match", 100.0 * equal / max(1, len(references))
