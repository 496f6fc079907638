"""Control characters in labels, names and tokens do not reach the terminal, nor scripts a page."""

import io
import json
import sys
import warnings

import pytest

from transformer_jax.commands.run_command import run_command
from transformer_jax.commands.terminal import EscapingStream, escaped, one_line
from transformer_jax.errors import UserError
from transformer_jax.plotting.page import Page

EVIL = "a\x1b[2Jb\x9b\x07\x00c\rd"


def test_escapes():
    assert escaped(EVIL) == r"a\u001b[2Jb\u009b\u0007\u0000c\u000dd"
    assert escaped("tab\tline\né 日本\u200f") == "tab\tline\né 日本\u200f"
    assert one_line("a\nerror: b\u2028c") == r"a\u000aerror: b\u2028c"
    assert json.loads(one_line(json.dumps({"a": "\x85\x1b"}, ensure_ascii=False))) == {"a": "\x85\x1b"}
    assert escaped("\ud800") == r"\ud800"


def test_a_stream_escapes_what_is_printed():
    stream = io.StringIO()
    print(EVIL, file=EscapingStream(stream))
    assert stream.getvalue() == escaped(EVIL) + "\n"
    assert EscapingStream(stream).getvalue() == stream.getvalue()


@pytest.mark.filterwarnings("default")
def test_a_command_prints_one_line_of_error(capsys):
    def fail():
        print(EVIL)
        warnings.warn(f"note {EVIL}\nerror: forged", stacklevel=2)
        raise UserError(f"photos/{EVIL}\nerror: forged: `run_dir` is missing")

    assert run_command(fail) == 2
    out, errors = capsys.readouterr()
    assert out == escaped(EVIL) + "\n"
    note, error = errors.splitlines()
    assert note.startswith(r"note: note a\u001b[2J")
    assert error.startswith(r"error: photos/a\u001b[2J")
    assert error.endswith(r"\u000aerror: forged: --run-dir is missing")
    assert not set("\x1b\x07\x9b\r") & set(out + errors)
    assert not isinstance(sys.stdout, EscapingStream)


SCRIPT = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.mark.parametrize("template", ["attention_page.html", "image_page.html"])
def test_a_page_contains_texts_only_as_data(template):
    data = {"title": SCRIPT, "kinds": [{"name": SCRIPT, "queries": [SCRIPT], "keys": ["<!--BODY-->"]}]}
    page = Page(template, data, height=10)
    assert "<script>alert" not in page.html
    assert "<img" not in page.html
    start = page.html.index("const DATA = ") + len("const DATA = ")
    assert json.loads(page.html[start : page.html.index(";\n", start)]) == data
    assert "<script>" not in page._repr_html_()
