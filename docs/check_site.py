"""Looks at the built site as a reader does: every link, and every page in a browser, wide and narrow.

    python docs/check_site.py docs/_build/html [--screenshots FOLDER]    # light and dark

The browser is a Chromium that is already on the machine; without one that part is skipped with a word.
"""

import argparse
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

SIZES: dict[str, Any] = {
    "desktop": {"width": 1280, "height": 900},
    "phone": {"width": 390, "height": 844},
}
SCHEMES: tuple[Any, ...] = ("light", "dark")
OVER = "() => document.documentElement.scrollWidth - window.innerWidth"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: a browser that asks nothing of a network
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
QUERY = "natural gradient"


class Page(HTMLParser):
    """The links of a page and the places in it that a link can name."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def wrong_links(site: Path) -> Iterator[str]:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("http:", "https:", "mailto:", "data:", "javascript:")):
                continue
            target, place = urldefrag(unquote(link))
            target = target.split("?")[0]
            file = (path.parent / target).resolve() if target else path
            if file.is_dir():
                file = file / "index.html"
            if not file.exists():
                yield f"{path.relative_to(site.resolve())}: no file for {link}"
            elif file in pages and place not in pages[file].places:
                yield f"{path.relative_to(site.resolve())}: no place for {link}"


def wrong_pages(site: Path, chromium: str, screenshots: Path | None) -> Iterator[str]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda m: said.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: said.append(str(e)))
        for path in sorted(site.rglob("*.html")):
            name = path.relative_to(site).as_posix()
            if name.startswith("_"):
                continue
            said.clear()
            page.goto(path.resolve().as_uri(), wait_until="load")
            page.evaluate("() => window.MathJax?.startup?.promise")
            if page.locator("mjx-merror").count():
                yield f"{name}: a formula that MathJax cannot read"
            for (size, view), scheme in product(SIZES.items(), SCHEMES):
                page.set_viewport_size(view)
                page.emulate_media(color_scheme=scheme)
                over = page.evaluate(OVER)
                if over > 0:
                    yield f"{name}, {size}, {scheme}: {over} pixels wider than the screen"
                if screenshots:
                    file = f"{name.removesuffix('.html').replace('/', '-')}-{size}-{scheme}.png"
                    page.screenshot(path=screenshots / file, full_page=True)
            yield from (f"{name}: {text}" for text in said)
        page.goto((site / "search.html").resolve().as_uri() + f"?q={QUERY}")
        page.wait_for_timeout(2000)
        if not page.locator("#search-results li").count():
            yield f"search.html: nothing found for {QUERY!r}"
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path)
    args = parser.parse_args()
    wrong = list(wrong_links(args.site))
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        print("SKIPPED: no Chromium was found, so the pages were not opened in a browser.")
    else:
        if args.screenshots:
            args.screenshots.mkdir(parents=True, exist_ok=True)
        wrong += wrong_pages(args.site, chromium, args.screenshots)
    print("\n".join(wrong) or "The site's links and pages are in order.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
