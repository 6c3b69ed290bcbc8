"""Draws README's picture from headline.md: `python headline_picture.py`.

Bars of what trains in the same memory: Keras's are outlines and kmem's are
solid, and each has its numbers beside it, so that no colour has to be seen. The
colours follow the reader's light or dark page.
"""

import pathlib
import re

TABLE = pathlib.Path(__file__).with_name("headline.md")
PICTURE = TABLE.parents[1] / "docs" / "headline.svg"
DEVICES = {
    "ResNet50": "ResNet50, images of 96 x 96, in 1 GB",
    "transformer": "A transformer of 12 layers, in 500 MB",
}
LABELS = {
    "Keras": "Keras",
    "kmem, remat": "kmem, a plan alone",
    "kmem, memory_budget": "kmem, memory_budget",
    "kmem, memory_budget, allow": "the same, with allow",
}
WIDTH, LEFT, LONGEST, ROW = 760, 190, 240, 26
STYLE = """\
<style>
text { font: 14px sans-serif; fill: #1f2328; }
.head { font-weight: bold; }
rect { stroke: #1f2328; stroke-width: 1.5; fill: none; }
.kmem { fill: #1a73e8; stroke: #1a73e8; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  rect { stroke: #f0f6fc; }
  .kmem { fill: #8ab4f8; stroke: #8ab4f8; }
}
</style>"""


def largest(table: str) -> dict[tuple[str, str], tuple[float, int, float]]:
    """(model, way) -> times Keras's batch, batch, time an example: the last
    run of the largest batch that trained."""
    best = {}
    pattern = r"^\| (\w+) \| ([^|]+) \| ([\d.]+) \| (\d+) \| [\d.]+ \| ([\d.]+)"
    for row in re.findall(pattern, table, re.MULTILINE):
        key, values = row[:2], (float(row[2]), int(row[3]), float(row[4]))
        if values[0] >= best.get(key, values)[0]:
            best[key] = values
    return best


def draw(table: str) -> str:
    """The picture, as SVG."""
    best = largest(table)
    most = max(times for times, _, _ in best.values())
    lines, y = [], -6
    for model, device in DEVICES.items():
        y += ROW
        lines.append(f'<text class="head" x="8" y="{y}">{device}</text>')
        for way, label in LABELS.items():
            times, batch, seconds = best[model, way]
            y += ROW
            kind = "keras" if way == "Keras" else "kmem"
            width = LONGEST * times / most
            words = f"batch {batch}"
            if way != "Keras":
                words += f", {seconds:.2f} times the time an example"
            lines += [
                f'<text x="{LEFT - 10}" y="{y}" text-anchor="end">{label}'
                "</text>",
                f'<rect class="{kind}" x="{LEFT}" y="{y - 14}" '
                f'width="{width:.1f}" height="18"/>',
                f'<text x="{LEFT + width + 8:.1f}" y="{y}">{words}</text>',
            ]
        y += 10
    title = "The largest batch that trains in the same memory"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" '
        f'height="{y + 6}" viewBox="0 0 {WIDTH} {y + 6}" role="img">'
    )
    whole = [head, f"<title>{title}</title>", STYLE, *lines, "</svg>"]
    return "\n".join(whole) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(TABLE.read_text(encoding="utf-8")))
