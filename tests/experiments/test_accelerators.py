"""The page of compiled programs: rows that are compiled anew replace their own alone."""

import pytest

from experiments import accelerators
from experiments.published_sizes import rows
from transformer_jax.errors import UserError

OTHER, ROW = rows()[:2]  # of the same model, with other rows a batch


def test_rows_are_replaced_one_by_one(tmp_path):
    path = tmp_path / "page.md"

    def table_row(row, text):
        return f"| {row.name} | {row.topology} | {text} |"

    ratios = [f"{row.name}, {row.topology}: {text}" for row in (ROW, OTHER) for text in ("1.1", "does not fit")]
    accelerators.write_page(path, [table_row(ROW, "old"), table_row(OTHER, "first")], ratios)
    text = path.read_text()
    assert text.index("first") < text.index("old"), "in the order of the sizes"
    assert (text.count(": 1.1"), text.count("does not fit\n")) == (2, 2)
    accelerators.write_page(path, [table_row(ROW, "new")], [ratios[0]])
    text = path.read_text()
    assert "old" not in text
    assert (text.count("| new |"), text.count("| first |")) == (1, 1)
    assert (text.count(": 1.1"), text.count("does not fit\n")) == (2, 1), "what is mended is gone"
    assert text.count(accelerators.HEAD) == 1


def test_a_row_that_there_is_not(monkeypatch):
    monkeypatch.setattr("sys.argv", ["accelerators", "--only", "GPT-5"])
    with pytest.raises(UserError, match="no row is compiled: `only` names none"):
        accelerators.main()
