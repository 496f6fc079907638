"""Sphinx configuration of the site, whose pages `pages.py` writes; `make docs` runs both."""

import inspect
import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from flax import nnx
from sphinx.util import inspect as sphinx_inspect
from sphinx.util import logging

import transformer_jax

project = "transformer_jax"
version = release = transformer_jax.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]
default_role = "code"  # single backticks in docstrings
smartquotes = False  # Otherwise --flags in prose would get dashes.

# Notebooks are shown with their saved outputs.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["amsmath", "dollarmath"]

autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False  # The section names the module.
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Arguments and attributes are plain lists: a directive per attribute would define a dataclass's fields twice.
napoleon_use_param = False
napoleon_use_rtype = False  # "(rows, starts): ..." is not a type.
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = "transformer_jax"
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"


# Markup that docstrings use, and plain text that reStructuredText would read as markup: |x|, x_, **x, "D.".
_MARKUP = re.compile(r"(`[^`]*`|(?<![\w*])\*\w[^*]*\w\*(?![\w*]))")
_PLAIN = re.compile(r"\||_(?!\w)|\*(?=\S)|(?:(?<=: |  )|^)(?=[A-Za-z]\.(?:\s|$))")


def escape(line):
    """Escape plain text that reStructuredText would read as markup."""
    pieces = _MARKUP.split(line)
    pieces[::2] = [_PLAIN.sub(r"\\\g<0>", piece) for piece in pieces[::2]]
    return "".join(pieces)


def as_restructured_text(app, what, name, obj, options, lines):
    """Convert a docstring to reStructuredText; indented blocks after an empty line become literal blocks."""
    converted, last_text, literal = [], "", False
    for previous, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith(" ")
        if indented and not literal and not previous.strip() and not last_text.startswith((" ", "- ")):
            literal = True
            converted += ["::", ""]
        elif line and not indented:
            literal = False
        converted.append(line if literal else escape(line))
        last_text = line or last_text
    lines[:] = converted


def class_signature(app, what, name, obj, options, signature, return_annotation):
    """Show the signature of a module's `__init__`, since that of Flax's metaclass accepts anything."""
    if what == "class" and issubclass(obj, nnx.Module):
        arguments = sphinx_inspect.signature(obj.__init__, bound_method=True)
        return sphinx_inspect.stringify_signature(arguments, unqualified_typehints=True), None
    if what == "class" and signature == "(*args, **kwargs)":  # A protocol has no constructor.
        return "", None
    return None


def show_all_methods(app, what, name, obj, skip, options):
    """Show public methods without a docstring too, such as those that a protocol describes."""
    if what != "class" or name.startswith("_"):
        return None
    if name == "replace":  # Flax adds this method to each of its dataclasses.
        return True
    return False if inspect.isfunction(obj) or isinstance(obj, (classmethod, property)) else None


def write_dashes(app, doctree):
    """Replace the two hyphens that Sphinx writes between a name and its text by a dash."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(" – " + text[4:]))


def mathml(as_block):
    """Return a visitor that writes formulas as MathML, so that pages load no MathJax from another host."""

    def visit(translator, node):
        try:
            translator.body.append(tex2mathml(node.astext(), as_block=as_block))
        except MathError as error:
            logging.getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
        raise nodes.SkipNode

    return visit, None


def setup(app):
    """Connect the functions of this file to Sphinx's events."""
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon's 500
    app.connect("autodoc-process-signature", class_signature)
    app.connect("autodoc-skip-member", show_all_methods)
    app.connect("doctree-read", write_dashes)
    app.add_html_math_renderer("mathml", mathml(as_block=False), mathml(as_block=True))
