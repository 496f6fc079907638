"""Draw docs/models.svg, the family tree of the models in the package's registry.

    python docs/draw_models.py

Every model of the registry needs an entry in `PLACES` with its column, row and paper. Encoders are drawn once,
without the heads of their tasks.
"""

import pathlib
from typing import Any, NamedTuple

from transformer_jax.models.registry import MODELS

FILE = pathlib.Path(__file__).with_name("models.svg")


class Place(NamedTuple):
    """The position of a model in the picture.

    Attributes:
      title: Name of the model.
      paper: Authors and year.
      column: Column of the grid, which stands for a time.
      row: Row of the grid.
      parents: Kind and name of each model that it is derived from.
    """

    title: str
    paper: str
    column: int
    row: int
    parents: tuple[tuple[str, str], ...] = ()


SEQ2SEQ, BAHDANAU, BERT = ("translator", "lstm"), ("translator", "bahdanau"), ("encoder", "bert")
VIT = ("image_encoder", "vit")
# Places by kind and name in the registry; names with the same module share the box of the first.
PLACES = {
    SEQ2SEQ: Place("LSTM seq2seq", "Sutskever et al. 2014", 0, 1),
    ("decoder", "lstm"): Place("Recurrent LM", "Zaremba et al. 2014", 0, 3),
    ("translator", "luong"): Place("Luong attention", "Luong et al. 2015", 1, 0, (SEQ2SEQ,)),
    BAHDANAU: Place("Additive attention", "Bahdanau et al. 2015", 1, 1, (SEQ2SEQ,)),
    ("translator", "hard_attention"): Place("Hard attention", "Xu et al. 2015", 1, 2, (BAHDANAU,)),
    ("translator", "transformer"): Place(
        "Transformer", "Vaswani et al. 2017", 2, 1, (("translator", "luong"), BAHDANAU)
    ),
    ("decoder", "gpt"): Place(
        "GPT-2", "Radford et al. 2019", 3, 1, (("translator", "transformer"), ("decoder", "lstm"))
    ),
    ("decoder", "llama"): Place("Llama", "Touvron et al. 2023", 4, 0, (("decoder", "gpt"),)),
    ("decoder", "modern_gpt"): Place("Modern GPT", "Jordan et al. 2024", 4, 2, (("decoder", "gpt"),)),
    BERT: Place("BERT", "Devlin et al. 2019", 3, 4, (("translator", "transformer"),)),
    ("encoder", "roberta"): Place("RoBERTa", "Liu et al. 2019", 4, 3, (BERT,)),
    ("encoder", "distilbert"): Place("DistilBERT", "Sanh et al. 2019", 4, 4, (BERT,)),
    ("encoder", "electra"): Place("ELECTRA", "Clark et al. 2020", 4, 5, (BERT,)),
    ("encoder", "longformer"): Place("Longformer", "Beltagy et al. 2020", 5, 2, (("encoder", "roberta"),)),
    VIT: Place("Vision Transformer", "Dosovitskiy et al. 2021", 4, 6, (BERT,)),
    ("self_distillation", "vit"): Place("DINO", "Caron et al. 2021", 5, 5, (VIT,)),
    ("masked_autoencoder", "vit"): Place("Masked autoencoder", "He et al. 2022", 5, 6, (VIT,)),
    ("image_text_encoder", "clip"): Place("CLIP, SigLIP", "Radford 2021, Zhai 2023", 5, 4, (VIT,)),
    ("captioner", "captioner"): Place("Captioner", "Xu et al. 2015, with a ViT", 5, 3, (VIT,)),
    ("speech_recognizer", "whisper"): Place(
        "Whisper", "Radford et al. 2022", 3, 0, (("translator", "transformer"),)
    ),
    ("graph_predictor", "graphormer"): Place("Graphormer", "Ying et al. 2021", 3, 5, (BERT,)),
    ("policy", "decision_transformer"): Place(
        "Decision Transformer", "Chen et al. 2021", 5, 0, (("decoder", "gpt"),)
    ),
}  # fmt: skip
YEARS = ("2014", "2015", "2017", "2019", "2019–24", "2021–23")

BOX_WIDTH, BOX_HEIGHT, GAP, ROW_GAP, MARGIN, TOP = 168, 64, 34, 20, 12, 34
# Colors of fill, edge and text by kind; boxes are filled, so that they are readable on light and dark pages.
COLORS = (
    {
        "translator": ("#dbeafe", "#3b82f6", "#172554"),
        "decoder": ("#dcfce7", "#16a34a", "#052e16"),
        "encoder": ("#fef3c7", "#d97706", "#451a03"),
    }
    | dict.fromkeys(
        ("image_encoder", "self_distillation", "masked_autoencoder"), ("#fce7f3", "#db2777", "#500724")
    )
    | dict.fromkeys(("image_text_encoder", "captioner"), ("#ede9fe", "#7c3aed", "#2e1065"))
    | {
        "speech_recognizer": ("#ccfbf1", "#0d9488", "#042f2e"),
        "policy": ("#fee2e2", "#dc2626", "#450a0a"),
        "graph_predictor": ("#ecfccb", "#65a30d", "#1a2e05"),
    }
)
LABELS = {
    "translator": "translators",
    "decoder": "language models",
    "encoder": "text encoders",
    "image_encoder": "vision models",
    "captioner": "text with images",
    "speech_recognizer": "speech",
    "policy": "decisions",
    "graph_predictor": "graphs",
}
GREY = "#7d8590"


def corner(place: Place) -> tuple[int, int]:
    """Return the upper left corner of a box."""
    return MARGIN + place.column * (BOX_WIDTH + GAP), TOP + place.row * (BOX_HEIGHT + ROW_GAP)


def names_of(kind: str, module: type) -> list[str]:
    """Return the names of a module in the registry."""
    return [name for name, entry in MODELS[kind].items() if entry.module is module]


def text(x: float, y: float, words: str, size: int, color: str, **style: Any) -> str:
    """Return a text element; `style` contains further attributes, with underscores instead of hyphens."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}"{extra}>{words}</text>'


def box(kind: str, place: Place, names: list[str]) -> list[str]:
    """Return the shapes of a model's box."""
    fill, edge, ink = COLORS[kind]
    x, y = corner(place)
    middle = x + BOX_WIDTH / 2
    return [
        f'<rect x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" fill="{fill}" stroke="{edge}" '
        'stroke-width="1.5"/>',
        text(middle, y + 22, place.title, 14, ink, font_weight="bold", text_anchor="middle"),
        text(middle, y + 39, ", ".join(names), 12, ink, text_anchor="middle", font_family="monospace"),
        text(middle, y + 55, place.paper, 11, ink, text_anchor="middle"),
    ]


def line(path: str) -> str:
    """Return a line along a path, with an arrowhead."""
    return f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.5" marker-end="url(#head)"/>'


def arrow(start: Place, end: Place) -> str:
    """Return the arrow between two boxes.

    It leads to the left edge of a box in the next column, to the lower edge of a box in a later column, or
    straight down within a column.
    """
    (x1, y1), (x2, y2) = corner(start), corner(end)
    if start.column == end.column:
        x, y = x1 + BOX_WIDTH // 2, y1 + BOX_HEIGHT
        return line(f"M{x} {y} V{y2 - 3}")
    x1, y1 = x1 + BOX_WIDTH, y1 + BOX_HEIGHT // 2
    if end.column - start.column > 1:
        path = f"M{x1} {y1} H{x2 + BOX_WIDTH // 2} V{y2 + BOX_HEIGHT + 3}"
    elif start.row == end.row:
        path = f"M{x1} {y1} H{x2 - 3}"
    else:
        path = f"M{x1} {y1} H{x1 + GAP // 2} V{y2 + BOX_HEIGHT // 2} H{x2 - 3}"
    return line(path)


def svg(title: str, width: float, height: float, shapes: list[str]) -> str:
    """Return a picture with these shapes, which may use the arrowhead "#head"."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif">',
            f"<title>{title}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{GREY}"/></marker></defs>',
            *shapes,
            "</svg>",
            "",
        ]
    )


def draw() -> str:
    """Return the picture as SVG."""
    boxes, arrows, drawn = [], [], set()
    for kind in COLORS:
        for name, entry in MODELS[kind].items():
            if (kind, entry.module) in drawn:
                continue
            drawn.add((kind, entry.module))
            place = PLACES[kind, name]
            boxes += box(kind, place, names_of(kind, entry.module))
            arrows += [arrow(PLACES[parent], place) for parent in place.parents]
    columns, rows = len(YEARS), 1 + max(place.row for place in PLACES.values())
    width = 2 * MARGIN + columns * BOX_WIDTH + (columns - 1) * GAP
    height = TOP + rows * BOX_HEIGHT + (rows - 1) * ROW_GAP + MARGIN
    years = [
        text(MARGIN + n * (BOX_WIDTH + GAP) + BOX_WIDTH / 2, 20, year, 13, GREY, text_anchor="middle")
        for n, year in enumerate(YEARS)
    ]
    legend, x, y = [], MARGIN, height - MARGIN - 26 * len(LABELS)
    for kind, label in LABELS.items():
        fill, edge, _ = COLORS[kind]
        legend.append(f'<rect x="{x}" y="{y}" width="16" height="16" rx="3" fill="{fill}" stroke="{edge}"/>')
        legend.append(text(x + 24, y + 13, label, 13, GREY))
        y += 26
    title = "The line of models, from the LSTM translator to today's decoders, encoders and vision models"
    return svg(title, width, height, [*years, *arrows, *boxes, *legend])


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
