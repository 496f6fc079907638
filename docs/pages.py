"""Writes the pages of the site below build/pages: the README, a page per room, notebooks, experiments.

Whatever stands in the folders comes in by itself: a new module, room, notebook or experiment
needs no line here.
"""

import ast
import pathlib
import re
import shutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
PAGES = ROOT / "build" / "pages"


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


def room(folder: pathlib.Path) -> str:
    """The page of a package: its docstring, then its modules, each with all that is public in it."""
    package = ".".join(folder.relative_to(ROOT).parts)
    text = titled(folder.name, "=") + f".. automodule:: {package}\n   :no-members:\n\n"
    for path in sorted(folder.glob("[!_]*.py")):
        text += titled(path.stem, "-") + f".. automodule:: {package}.{path.stem}\n\n"
        # A function with a gradient of its own is an object, which automodule leaves out.
        for name in re.findall(r"^@jax\.custom_\w+\ndef ([a-z]\w*)", path.read_text(encoding="utf-8"), re.M):
            text += f".. autofunction:: {package}.{path.stem}.{name}\n\n"
    return text


def rooms() -> list[str]:
    """Those of the package in the order of their names, then what stands beside them."""
    folders = [path.parent for path in sorted(PACKAGE.glob("*/__init__.py"))]
    for folder in [*folders, PACKAGE]:
        write(f"rooms/{folder.name}.rst", room(folder))
    return [f"rooms/{folder.name}" for folder in [*folders, PACKAGE]]


def notebooks() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    for name in names:
        write(f"notebooks/{name}.ipynb", (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [f"notebooks/{name}" for name in names]


def experiments() -> None:
    """Read, not imported: some need torch. A docstring is Markdown as it stands."""
    text = "# Experiments\n"
    for path in sorted((ROOT / "experiments").glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"python -m experiments.{path.stem}" in docstring:
            text += f"\n## {path.stem}\n\n{docstring}\n"
    write("experiments.md", text)


def readable(name: str) -> str:
    """A Markdown file of the root; the files that it links to are put beside the page."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        (PAGES / link).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / link, PAGES / link)
    return text


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    experiments()
    write("changelog.md", readable("CHANGELOG.md"))
    contents = toctree("Rooms", rooms()) + toctree("Notebooks", notebooks())
    write("index.md", readable("README.md") + contents + toctree("More", ["experiments", "changelog"]))


if __name__ == "__main__":
    main()
