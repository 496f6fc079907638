"""Writes the pages of the site below build/pages: README, guides, a page per package, notebooks, experiments.

Everything in these folders is included by itself: a new module, package, guide (docs/*.md), notebook or
experiment needs no line here. Pages keep the places that their files have in the repository, so that the
links between them work on a code host and on the site.
"""

import ast
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
PAGES = ROOT / "build" / "pages"
# Guides that a reader wants first; the others follow by name.
FIRST = ("getting_started", "translators", "decoders", "encoders", "vision", "data", "recipes", "runs")


def write(name: str, text: str) -> None:
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def toctree(caption: str, names: list[str]) -> str:
    if not names:
        return ""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def titled(title: str, underline: str) -> str:
    return f"{title}\n{underline * len(title)}\n\n"


def package_page(folder: pathlib.Path) -> str:
    """The page of a package: its docstring, then its modules with all that is public in them, then the packages
    that it contains."""
    parts = folder.relative_to(ROOT).parts
    package = ".".join(parts)
    text = titled(".".join(parts[1:]) or package, "=") + f".. automodule:: {package}\n   :no-members:\n\n"
    for path in sorted(folder.glob("[!_]*.py")):
        text += titled(path.stem, "-") + f".. automodule:: {package}.{path.stem}\n\n"
        # A function with a gradient of its own is an object, which automodule leaves out.
        for name in re.findall(r"^@jax\.custom_\w+\ndef ([a-z]\w*)", path.read_text(encoding="utf-8"), re.M):
            text += f".. autofunction:: {package}.{path.stem}.{name}\n\n"
    inner = [path.parent.name for path in sorted(folder.glob("*/__init__.py"))] if folder != PACKAGE else []
    if inner:
        text += "\n".join([".. toctree::", "", *(f"   {folder.name}/{name}" for name in inner), ""])
    return text


def packages() -> list[str]:
    """Writes a page per package, nested ones below the page of theirs; returns the pages of the top level, the
    package's own modules last."""
    folders = [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))]
    for folder in folders:
        write(f"packages/{page_name(folder)}.rst", package_page(folder))
    inner = [folder for folder in folders if folder.parent == PACKAGE]
    return [f"packages/{page_name(folder)}" for folder in [*inner, PACKAGE]]


def page_name(folder: pathlib.Path) -> str:
    """data/corpora of transformer_jax/data/corpora."""
    return folder.name if folder == PACKAGE else folder.relative_to(PACKAGE).as_posix()


def notebooks() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    for name in names:
        write(f"notebooks/{name}.ipynb", (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [f"notebooks/{name}" for name in names]


def experiments() -> None:
    """Read, not imported: some need torch. A docstring is Markdown as it stands."""
    text = "# Experiments\n"
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python -m {module}" in docstring:
            text += f"\n## {path.stem}\n\n{docstring}\n"
    write("experiments.md", text)


def with_linked_files(name: str) -> str:
    """A Markdown file of the repository; files that it links to and that are no pages are copied beside it."""
    source = ROOT / name
    text = source.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        target = (source.parent / link).resolve()
        if target.suffix not in (".md", ".ipynb"):
            copy = PAGES / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
    return text


def measurements() -> list[str]:
    """Write the records of measurements; return their pages."""
    names = sorted(path.stem for path in (ROOT / "docs/measurements").glob("*.md"))
    for name in names:
        write(f"docs/measurements/{name}.md", with_linked_files(f"docs/measurements/{name}.md"))
    return [f"docs/measurements/{name}" for name in names]


def guides() -> list[str]:
    found = {path.stem for path in (ROOT / "docs").glob("*.md")}
    names = [name for name in FIRST if name in found] + sorted(found - set(FIRST))
    for name in names:
        write(f"docs/{name}.md", with_linked_files(f"docs/{name}.md"))
    return [f"docs/{name}" for name in names]


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    experiments()
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        write(name, with_linked_files(name))
    contents = toctree("Guides", guides()) + toctree("API reference", packages())
    contents += toctree("Notebooks", notebooks()) + toctree("Measurements", measurements())
    contents += toctree("More", ["experiments", "CONTRIBUTING", "CHANGELOG"])
    write("index.md", with_linked_files("README.md") + contents)


if __name__ == "__main__":
    main()
