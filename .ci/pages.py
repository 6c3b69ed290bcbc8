"""What the documentation's site holds beside `docs/`, for `mkdocs.yml`.

Benchmarks, the changelog, and each source that a page links to become pages,
and links between them lead to these pages: what is right in the repository
is right on the site.
"""

import os
import pathlib
import re

from mkdocs.structure.files import File
from pygments.formatters import HtmlFormatter

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
LIGHT, DARK = "default", "github-dark"


def site_path(path: pathlib.Path) -> pathlib.PurePosixPath:
    """Where the site has a file of the repository."""
    inside = pathlib.PurePosixPath(path.relative_to(ROOT).as_posix())
    if inside.parts[0] == "docs":
        return inside.relative_to("docs")
    return inside if inside.suffix == ".md" else inside.with_suffix(".py.md")


def with_links_of_the_site(text: str, path: pathlib.Path) -> str:
    """The Markdown of a file, its links to files as the site has them."""

    def rewrite(link: re.Match) -> str:
        target = (path.parent / link[1]).resolve()
        if not target.is_file() or ROOT not in target.parents:
            return link[1]
        start = site_path(path).parent
        return pathlib.Path(
            os.path.relpath(site_path(target), start)
        ).as_posix()

    return LINK.sub(rewrite, text)


def page(path: pathlib.Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return with_links_of_the_site(text, path)
    name = path.relative_to(ROOT).as_posix()
    return f"# {name}\n\n````python\n{text}````\n"


def list_of(paths: list[pathlib.Path], title: str, text: str) -> str:
    lines = [f"# {title}", "", text, ""]
    for path in paths:
        first = path.read_text(encoding="utf-8").splitlines()[0]
        name = first.strip('# ."') if path.suffix == ".md" else f"`{path.name}`"
        about = "" if path.suffix == ".md" else ": " + first.strip('"')
        lines.append(f"* [{name}]({site_path(path).name}){about}")
    return "\n".join(lines) + "\n"


def sources_linked_from(paths: list[pathlib.Path]) -> set[pathlib.Path]:
    linked = set()
    for path in paths:
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            target = (path.parent / link).resolve()
            if target.suffix == ".py" and target.is_file():
                linked.add(target)
    return linked


def code_css() -> str:
    """The colours of code, in the light and in the dark."""
    light = HtmlFormatter(style=LIGHT).get_style_defs(".highlight")
    dark = HtmlFormatter(style=DARK).get_style_defs(
        "[data-bs-theme=dark] .highlight"
    )
    return f"{light}\n{dark}\n"


def on_files(files, config):
    benchmarks = sorted((ROOT / "benchmarks").glob("*.md"))
    examples = sorted((ROOT / "examples").glob("*.py"))
    house = [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    linked = sources_linked_from(
        [*(ROOT / "docs").rglob("*.md"), *benchmarks, *house]
    )
    contents = {
        site_path(path): page(path)
        for path in (*benchmarks, *house, *sorted({*examples, *linked}))
    }
    contents["benchmarks/index.md"] = list_of(
        benchmarks,
        "Benchmarks",
        "Every number of the documentation comes from one of these tables, "
        "which name the script, the versions, the hardware and the date.",
    )
    contents["examples/index.md"] = list_of(
        examples, "Examples", "Whole programs, which run on a CPU."
    )
    contents["assets/code.css"] = code_css()
    for path, content in contents.items():
        files.append(File.generated(config, str(path), content=content))
    return files


def on_page_markdown(markdown, page, config, files):
    path = page.file.abs_src_path
    if path is None:  # A generated page, whose links are the site's already.
        return markdown
    return with_links_of_the_site(markdown, pathlib.Path(path))
