"""The documentation's site: it is built strictly, and a browser opens it."""

import http.server
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

# Goes first in every page: it sees the page's errors, those of what the page
# loads among them, and how far the page is wider than the screen.
SPY = """<script>
const problems = [];
addEventListener("error", event => problems.push(
    event.message || "cannot load " + event.target.outerHTML), true);
addEventListener("unhandledrejection", event =>
    problems.push(String(event.reason)));
console.error = (...words) => problems.push(words.join(" "));
addEventListener("load", () => {
    const page = document.documentElement;
    const extra = page.scrollWidth - page.clientWidth;
    if (extra > 1) problems.push("wider than the screen by " + extra);
    parent.postMessage(problems, "*");
});
</script>"""

# Opens one page after the other in a frame, wide and narrow, and tells.
DRIVER = """<!doctype html><body><iframe id="frame"></iframe><script>
const pages = %s, found = [], frame = document.getElementById("frame");
const visits = pages.flatMap(page => [1280, 360].map(width => [page, width]));
let now = -1;
function next() {
    if (++now == visits.length) {
        fetch("/done", {method: "POST", body: JSON.stringify(found)});
        return;
    }
    frame.style.width = visits[now][1] + "px";
    frame.src = visits[now][0] + "?width=" + visits[now][1];
}
addEventListener("message", event => {
    found.push([visits[now].join(" at "), event.data]);
    next();
});
next();
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, which is built in some seconds."""
    pytest.importorskip("properdocs", reason='needs pip install ".[docs]"')
    pytest.importorskip("mkdocstrings", reason='needs pip install ".[docs]"')
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [
            *(sys.executable, "-m", "properdocs", "build", "--strict"),
            *("-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)),
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def test_the_site_has_docs_reference_benchmarks_examples_and_changelog(site):
    for page, text in {
        "index.html": 'src="headline.svg"',
        "reference/training/index.html": "kmem.wrap",
        "reference/memory/index.html": "reset_peak",
        "benchmarks/headline/index.html": "benchmarks/headline.py",
        "examples/gan.py/index.html": "keras",
        "CHANGELOG/index.html": "Unreleased",
    }.items():
        assert text in (site / page).read_text(encoding="utf-8"), page


def test_the_site_asks_no_other_server_for_anything(site):
    loads = re.compile(r'<(?:script|img|link)\b[^>]*(?:src|href)="https?:')
    for page in site.rglob("*.html"):
        assert not loads.search(page.read_text(encoding="utf-8")), page


def serve(site, results):
    """A server of the site, with the spy in each page."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(site))

        def do_GET(self):
            path = self.path.partition("?")[0]
            file = site / path.lstrip("/")
            if path == "/driver":
                self.answer(DRIVER % json.dumps(pages_of(site)))
            elif path.endswith("/") and (file / "index.html").is_file():
                text = (file / "index.html").read_text(encoding="utf-8")
                self.answer(text.replace("<head>", "<head>" + SPY, 1))
            else:
                super().do_GET()

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            results.put(json.loads(self.rfile.read(length)))
            self.answer("")

        def answer(self, text):
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def pages_of(site) -> list[str]:
    folders = sorted(page.parent for page in site.rglob("index.html"))
    inside = [folder.relative_to(site).as_posix() for folder in folders]
    return ["/" if name == "." else f"/{name}/" for name in inside]


def visit(site, folder) -> dict[str, list[str]]:
    """What a browser complains of, by page and width."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a browser: apt-get install chromium")
    results = queue.Queue()
    server = serve(site, results)
    address = f"http://127.0.0.1:{server.server_address[1]}/driver"
    process = subprocess.Popen(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu"),
            *("--no-first-run", f"--user-data-dir={folder}", address),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return {page: said for page, said in results.get(timeout=500) if said}
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_a_browser_opens_every_page_without_an_error(site, tmp_path):
    assert visit(site, tmp_path) == {}


@pytest.mark.slow
def test_a_browser_tells_of_a_page_that_is_broken(tmp_path):
    pages = {
        "error": "<script>nothing.here</script>",
        "missing": "<script src='gone.js'></script>",
        "wide": "<p style='width: 999px'>wide</p>",
        "right": "<p>right</p>",
    }
    for name, body in pages.items():
        (tmp_path / "site" / name).mkdir(parents=True)
        page = tmp_path / "site" / name / "index.html"
        page.write_text(f"<head></head><body>{body}</body>")

    complaints = visit(tmp_path / "site", tmp_path / "browser")

    assert list(complaints) == [
        *("/error/ at 1280", "/error/ at 360"),
        *("/missing/ at 1280", "/missing/ at 360", "/wide/ at 360"),
    ]
