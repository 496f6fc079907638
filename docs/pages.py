"""Write the pages of the site to build/pages: README, guides, a page per package, notebooks, experiments.

New modules, packages, guides (docs/*.md), notebooks and experiments are included without a change of this file.
Pages keep the paths of their files in the repository, so that links work on a code host and on the site.
"""

import ast
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
PAGES = ROOT / "build" / "pages"
# Guides at the start of the list; the others follow in alphabetical order.
FIRST = (
    "getting_started", "translators", "decoders", "encoders", "vision", "multimodal", "speech", "decisions",
    "graphs", "data", "published", "recipes", "runs", "trust",
)  # fmt: skip


def write(name: str, text: str) -> None:
    """Write a page."""
    path = PAGES / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def toctree(caption: str, names: list[str]) -> str:
    """Return a table of contents in Markdown, or nothing if there are no pages."""
    if not names:
        return ""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""])


def heading(title: str, underline: str) -> str:
    """Return a heading in reStructuredText."""
    return f"{title}\n{underline * len(title)}\n\n"


def package_page(folder: pathlib.Path) -> str:
    """Return the page of a package: its docstring, its modules with public members, and its subpackages."""
    parts = folder.relative_to(ROOT).parts
    package = ".".join(parts)
    text = heading(".".join(parts[1:]) or package, "=") + f".. automodule:: {package}\n   :no-members:\n\n"
    for path in sorted(folder.glob("[!_]*.py")):
        text += heading(path.stem, "-") + f".. automodule:: {package}.{path.stem}\n\n"
        # `automodule` omits functions with a custom gradient, because they are objects.
        for name in re.findall(r"^@jax\.custom_\w+\ndef ([a-z]\w*)", path.read_text(encoding="utf-8"), re.M):
            text += f".. autofunction:: {package}.{path.stem}.{name}\n\n"
    subpackages = [path.parent.name for path in sorted(folder.glob("*/__init__.py"))]
    if subpackages and folder != PACKAGE:
        text += "\n".join([".. toctree::", "", *(f"   {folder.name}/{name}" for name in subpackages), ""])
    return text


def packages() -> list[str]:
    """Write a page per package and return the pages of the top level, with `transformer_jax` as the last."""
    folders = [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))]
    for folder in folders:
        write(f"packages/{page_name(folder)}.rst", package_page(folder))
    top_level = [folder for folder in folders if folder.parent == PACKAGE]
    return [f"packages/{page_name(folder)}" for folder in [*top_level, PACKAGE]]


def page_name(folder: pathlib.Path) -> str:
    """Return the path of a package's page, such as data/corpora for transformer_jax/data/corpora."""
    return folder.name if folder == PACKAGE else folder.relative_to(PACKAGE).as_posix()


def notebooks() -> list[str]:
    """Copy the notebooks and return their pages."""
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    for name in names:
        write(f"notebooks/{name}.ipynb", (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [f"notebooks/{name}" for name in names]


def experiments() -> None:
    """Write a page with the docstrings of the experiments, which are Markdown."""
    # The modules are parsed instead of imported, because some need torch.
    text = "# Experiments\n"
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python -m {module}" in docstring:
            text += f"\n## {path.stem}\n\n{docstring}\n"
    write("experiments.md", text)


def with_linked_files(name: str) -> str:
    """Return the text of a Markdown file, and copy the files that it links to unless they are pages."""
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
    """Write the guides and return their pages."""
    existing = {path.stem for path in (ROOT / "docs").glob("*.md")}
    names = [name for name in FIRST if name in existing] + sorted(existing - set(FIRST))
    for name in names:
        write(f"docs/{name}.md", with_linked_files(f"docs/{name}.md"))
    return [f"docs/{name}" for name in names]


def main() -> None:
    """Write all pages."""
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
