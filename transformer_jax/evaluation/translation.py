"""Scores of translations, by sacreBLEU (Post 2018)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sacrebleu.metrics import BLEU, CHRF

BLEU_TOKENIZERS = tuple(BLEU.TOKENIZERS)


def check_bleu_tokenizer(name: str) -> None:
    """Check that sacreBLEU can use a tokenizer; "auto" is always accepted.

    Raises:
      ValueError: sacreBLEU has no tokenizer of this name, or its requirements are not installed.
    """
    if name == "auto":
        return
    if name not in BLEU_TOKENIZERS:
        raise ValueError(f"unknown BLEU tokenizer {name!r}: choose auto or one of {', '.join(BLEU_TOKENIZERS)}")
    try:
        BLEU(tokenize=name)
    except (RuntimeError, ImportError, OSError) as error:
        raise ValueError(f"BLEU tokenizer {name!r} cannot be used: {' '.join(str(error).split())}") from None


# The first and the last letter of a script, its minimum share of the letters, and sacreBLEU's tokenizers in the
# order of preference. Kana come before Chinese characters, because Japanese has both.
_SCRIPTS = (
    ("\u3041", "\u30ff", 0.02, ("ja-mecab", "char")),  # kana
    ("\uff66", "\uff9f", 0.02, ("ja-mecab", "char")),  # kana of half width
    ("\uac00", "\ud7a3", 0.2, ("ko-mecab", "char")),  # hangul
    ("\u3400", "\u9fff", 0.2, ("zh",)),
    ("\u0e01", "\u0fff", 0.2, ("char",)),  # Thai, Lao and Tibetan
    ("\u1000", "\u109f", 0.2, ("char",)),  # Burmese
    ("\u1780", "\u17ff", 0.2, ("char",)),  # Khmer
)


def bleu_tokenizer_for(references: Sequence[str]) -> str:
    """Return sacreBLEU's tokenizer for the script of references.

    "ja-mecab" for Japanese and "ko-mecab" for Korean if they are installed, else "char"; "zh" for Chinese;
    "char" for Thai, Lao, Tibetan, Burmese and Khmer; "13a" for all other text.

    Args:
      references: Sentences in the target language.
    """
    letters = [character for text in references for character in text if character.isalpha()]
    for first, last, share, tokenizers in _SCRIPTS:
        if sum(first <= letter <= last for letter in letters) > share * len(letters):
            return next(name for name in tokenizers if name in ("zh", "char") or _is_installed(name))
    return "13a"


def _is_installed(name: str) -> bool:
    try:
        check_bleu_tokenizer(name)
    except ValueError:
        return False
    return True


def bleu_signature(references: Sequence[str], tokenize: str = "auto") -> str:
    """Return sacreBLEU's signature, which lists all settings of the BLEU score; see `translation_scores`."""
    bleu = BLEU(tokenize=bleu_tokenizer_for(references) if tokenize == "auto" else tokenize)
    bleu.corpus_score(references, [references])
    return str(bleu.get_signature())


def translation_scores(
    hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokenize: str = "auto"
) -> Iterator[tuple[str, float]]:
    """Yield ("bleu", 0 to 100), ("chrf", 0 to 100) and ("exact_match", percent of equal sentences).

    Args:
      hypotheses: Translations.
      references: A reference for each translation.
      bleu_tokenize: sacreBLEU's tokenizer; "auto" chooses it by the script of the references (see
        `bleu_tokenizer_for`), "none" is for tokenized text.

    Raises:
      ValueError: The numbers of hypotheses and references differ.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if bleu_tokenize == "auto":
        bleu_tokenize = bleu_tokenizer_for(references)
    # `force` silences sacreBLEU's warning about tokenized periods, which tokenized text has.
    bleu = BLEU(tokenize=bleu_tokenize, force=True)
    yield "bleu", bleu.corpus_score(hypotheses, [references]).score
    yield "chrf", CHRF().corpus_score(hypotheses, [references]).score
    equal = sum(h == r for h, r in zip(hypotheses, references, strict=True))
    yield "exact_match", 100.0 * equal / max(1, len(references))
