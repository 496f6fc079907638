"""The page of compiled programs: compiling some rows again replaces only those rows."""

import pytest

from experiments import accelerators
from experiments.published_sizes import rows
from transformer_jax.errors import UserError

FIRST, SECOND = rows()[:2]  # the same model with two batch sizes


def test_rows_are_replaced_one_by_one(tmp_path):
    path = tmp_path / "page.md"

    def table_row(row, text):
        return f"| {row.name} | {row.topology} | {text} |"

    ratios = [
        f"{row.name}, {row.topology}: {text}" for row in (SECOND, FIRST) for text in ("1.1", "does not fit")
    ]
    accelerators.write_page(path, [table_row(SECOND, "old"), table_row(FIRST, "first")], ratios)
    text = path.read_text()
    assert text.index("first") < text.index("old"), "in the order of the sizes"
    assert (text.count(": 1.1"), text.count("does not fit\n")) == (2, 2)
    accelerators.write_page(path, [table_row(SECOND, "new")], [ratios[0]])
    text = path.read_text()
    assert "old" not in text
    assert (text.count("| new |"), text.count("| first |")) == (1, 1)
    assert (text.count(": 1.1"), text.count("does not fit\n")) == (2, 1), "fixed rows are removed"
    assert text.count(accelerators.HEAD) == 1


def test_an_unknown_row_is_refused(monkeypatch):
    monkeypatch.setattr("sys.argv", ["accelerators", "--only", "GPT-5"])
    with pytest.raises(UserError, match="no row is compiled: `only` names none"):
        accelerators.main()
