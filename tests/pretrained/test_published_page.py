"""The page on published folders names everything that is supported."""

from tests.conftest import ROOT
from transformer_jax.data.tokenizers.image_processor import CLASSES
from transformer_jax.data.tokenizers.tokenizer_classes import KNOWN_CLASSES
from transformer_jax.pretrained.families import FAMILIES


def test_the_page_names_all_architectures_and_classes():
    page = (ROOT / "docs/published.md").read_text()
    architectures = {family.architecture for families in FAMILIES.values() for family in families}
    processors = {f"{name}ImageProcessor" for name in CLASSES}
    for name in (*architectures, *KNOWN_CLASSES, *processors, *FAMILIES):
        assert f"`{name}`" in page, name
