"""Draw docs/data_path.svg, the path of the data through the package.

python docs/draw_data_path.py
"""

import pathlib

from draw_models import line, svg, text

FILE = pathlib.Path(__file__).with_name("data_path.svg")
WIDTH, HEIGHT, GAP, MARGIN = 196, 76, 34, 14
BLUE, GREEN, AMBER = (
    ("#dbeafe", "#3b82f6", "#172554"),
    ("#dcfce7", "#16a34a", "#052e16"),
    ("#fef3c7", "#d97706", "#451a03"),
)
# (title, folder, output, colors) of each box, by row.
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


def box(x: float, y: float, title: str, folder: str, output: str, colors: tuple[str, str, str]) -> list[str]:
    """Return the shapes of a box with its upper left corner at (x, y)."""
    fill, edge, ink = colors
    middle = x + WIDTH / 2
    return [
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{fill}" stroke="{edge}" '
        'stroke-width="1.5"/>',
        text(middle, y + 24, title, 15, ink, font_weight="bold", text_anchor="middle"),
        text(middle, y + 44, folder, 12, ink, text_anchor="middle", font_family="monospace"),
        text(middle, y + 63, output, 12, ink, text_anchor="middle"),
    ]


def draw() -> str:
    """Return the picture as SVG."""
    shapes = []
    for row, boxes in enumerate(ROWS):
        y = MARGIN + row * (HEIGHT + 56)
        for column, (title, folder, output, colors) in enumerate(boxes):
            x = MARGIN + column * (WIDTH + GAP)
            shapes += box(x, y, title, folder, output, colors)
            if column:
                shapes.append(line(f"M{x - GAP} {y + HEIGHT / 2} H{x - 3}"))
    columns = len(ROWS[0])
    width, height = 2 * MARGIN + columns * WIDTH + (columns - 1) * GAP, 2 * MARGIN + 2 * HEIGHT + 56
    end, turn, start = (
        MARGIN + (columns - 1) * (WIDTH + GAP) + WIDTH / 2,
        MARGIN + HEIGHT + 28,
        MARGIN + WIDTH / 2,
    )
    shapes.append(line(f"M{end} {MARGIN + HEIGHT} V{turn} H{start} V{MARGIN + HEIGHT + 53}"))
    steps = "corpora, tokenizers, batches, objective, model, step, loop, run folder, trained model, use"
    return svg(f"The data path: {steps}", width, height, shapes)


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
