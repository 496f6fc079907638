"""Draw docs/data_path.svg: the way of the data through the package.

python docs/draw_data_path.py
"""

import pathlib

from draw_models import GREY, text

FILE = pathlib.Path(__file__).with_name("data_path.svg")
WIDTH, HEIGHT, GAP, MARGIN = 196, 76, 34, 14
BLUE, GREEN, AMBER = (
    ("#dbeafe", "#3b82f6", "#172554"),
    ("#dcfce7", "#16a34a", "#052e16"),
    ("#fef3c7", "#d97706", "#451a03"),
)
# Title, folder, what flows on to the next box; rows are read from left to right, one below the other.
ROWS = (
    (
        ("Corpora", "data/corpora/", "texts, images, labels", BLUE),
        ("Tokenizers", "data/tokenizers/", "token ids, pixels", BLUE),
        ("Batches", "data/batches/", "arrays of fixed shape", BLUE),
        ("Objective", "tasks/", "sums and weights of the loss", GREEN),
        ("Model", "models/, layers/", "logits, states", GREEN),
    ),
    (
        ("Step", "training/step.py", "gradients, new state", GREEN),
        ("Loop", "training/loop.py", "metrics, checkpoints", GREEN),
        ("Run folder", "runs/NAME/", "config, weights, processor", AMBER),
        ("Trained model", "tasks/, pretrained/", "load(folder)", AMBER),
        ("Use", "decoding/, evaluation/", "text, labels, scores, maps", AMBER),
    ),
)


def box(x: float, y: float, title: str, folder: str, flow: str, colors: tuple[str, str, str]) -> list[str]:
    fill, edge, ink = colors
    middle = x + WIDTH / 2
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{fill}" stroke="{edge}" '
        'stroke-width="1.5"/>',
        text(middle, y + 24, title, 15, ink, font_weight="bold", text_anchor="middle"),
        text(middle, y + 44, folder, 12, ink, text_anchor="middle", font_family="monospace"),
        text(middle, y + 63, flow, 12, ink, text_anchor="middle"),
    ]


def arrow(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{GREY}" stroke-width="1.5" marker-end="url(#head)"/>'


def draw() -> str:
    """Return the picture as SVG."""
    shapes = []
    for row, boxes in enumerate(ROWS):
        y = MARGIN + row * (HEIGHT + 56)
        for column, (title, folder, flow, colors) in enumerate(boxes):
            x = MARGIN + column * (WIDTH + GAP)
            shapes += box(x, y, title, folder, flow, colors)
            if column:
                shapes.append(arrow(f"M{x - GAP} {y + HEIGHT / 2} H{x - 3}"))
    columns = len(ROWS[0])
    width, height = 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP, 2 * MARGIN + 2 * HEIGHT + 56
    end, turn, start = (
        MARGIN + (columns - 1) * (WIDTH + GAP) + WIDTH / 2,
        MARGIN + HEIGHT + 28,
        MARGIN + WIDTH / 2,
    )
    shapes.append(arrow(f"M{end} {MARGIN + HEIGHT} V{turn} H{start} V{MARGIN + HEIGHT + 53}"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, Helvetica, Arial, sans-serif">',
            "<title>The data path: corpora, tokenizers, batches, objective, model, step, loop, run folder, "
            "trained model, use</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{GREY}"/></marker></defs>',
            *shapes,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
