"""How Sphinx builds the site from the pages that `pages.py` wrote; `make docs` runs both."""

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
smartquotes = False  # --flags in prose stay what one types

# Notebooks are shown as they were saved.
nb_execution_mode = "off"
myst_heading_anchors = 3
myst_enable_extensions = ["amsmath", "dollarmath"]

autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False  # the section says it
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# "query, key, value: ..." is one entry for three names, which `:param:` cannot say. Attributes are listed
# alike: a directive for each would define a dataclass's fields a second time.
napoleon_use_param = False
napoleon_use_rtype = False  # "(rows, starts): ..." reads as it is written
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = "transformer_jax"
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"


# What docstrings mean as markup, and what else reStructuredText would take for some: |x|, x_, **x, a lone "D.".
_MARKUP = re.compile(r"(`[^`]*`|(?<![\w*])\*\w[^*]*\w\*(?![\w*]))")
_PLAIN = re.compile(r"\||_(?!\w)|\*(?=\S)|(?:(?<=: |  )|^)(?=[A-Za-z]\.(?:\s|$))")


def escaped(line):
    pieces = _MARKUP.split(line)
    pieces[::2] = [_PLAIN.sub(r"\\\g<0>", piece) for piece in pieces[::2]]
    return "".join(pieces)


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are plain prose, and blocks that are indented behind an empty line stand as they are."""
    prose, above, literal = [], "", False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith(" ")
        if indented and not literal and not before.strip() and not above.startswith((" ", "- ")):
            literal = True
            prose += ["::", ""]
        elif line and not indented:
            literal = False
        prose.append(line if literal else escaped(line))
        above = line or above
    lines[:] = prose


def own_signature(app, what, name, obj, options, signature, return_annotation):
    """A module's arguments are those of `__init__`; what Flax calls in front of it takes anything."""
    if what == "class" and issubclass(obj, nnx.Module):
        arguments = sphinx_inspect.signature(obj.__init__, bound_method=True)
        return sphinx_inspect.stringify_signature(arguments, unqualified_typehints=True), None
    if what == "class" and signature == "(*args, **kwargs)":  # of a protocol: it is never made
        return "", None
    return None


def with_all_methods(app, what, name, obj, skip, options):
    """Public methods that need no words of their own, as those that a protocol describes, are shown too."""
    if what != "class" or name.startswith("_"):
        return None
    if name == "replace":  # Flax adds it to each of its dataclasses
        return True
    return False if inspect.isfunction(obj) or isinstance(obj, (classmethod, property)) else None


def dashes(app, doctree):
    """A dash between a name and its text, where Sphinx writes two hyphens."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith(" -- "):
            text.parent.replace(text, nodes.Text(" – " + text[4:]))


def mathml(as_block):
    """Formulas are translated here: the pages load nothing from other hosts, as MathJax would be."""

    def visit(translator, node):
        try:
            translator.body.append(tex2mathml(node.astext(), as_block=as_block))
        except MathError as error:
            logging.getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
        raise nodes.SkipNode

    return visit, None


def setup(app):
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # napoleon has 500
    app.connect("autodoc-process-signature", own_signature)
    app.connect("autodoc-skip-member", with_all_methods)
    app.connect("doctree-read", dashes)
    app.add_html_math_renderer("mathml", mathml(as_block=False), mathml(as_block=True))
