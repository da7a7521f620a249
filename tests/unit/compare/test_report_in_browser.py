"""The page in a real browser: silent, self-contained, readable in the dark, no wider than a phone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_ops.compare.report import write_report
from tests.support.chromium import Visit, find_chromium, visit

pytestmark = pytest.mark.browser

PHONE, DESKTOP = 390, 1200

#: The lowest contrast of any text with what lies behind it, and the text; pictures' text included.
LOWEST_CONTRAST = """
(() => {
  const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return m.length < 4 ? [...m, 1] : m; };
  const f = v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const lum = ([r, g, b]) => { return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b); };
  const behind = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0.99) return c; }
    return [255, 255, 255, 1]; };
  let worst = [21, ''];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || e.closest('title, desc, defs')) continue;
    const style = getComputedStyle(e);
    const ink = lum(parse(e.closest('svg') ? style.fill : style.color)), paper = lum(behind(e));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < worst[0]) worst = [ratio, e.textContent.trim().slice(0, 60)];
  }
  return worst;
})()
"""

OVERFLOW = """
[document.documentElement.scrollWidth, innerWidth,
 [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll, pre, svg')
   && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + ' ' + e.className)]
"""

OVERLAPS = """
[...document.querySelectorAll('svg')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  return boxes.flatMap(([a, r], i) => boxes.slice(i + 1)
    .filter(([b, s]) => Math.min(r.right, s.right) - Math.max(r.left, s.left) > 1
      && Math.min(r.bottom, s.bottom) - Math.max(r.top, s.top) > 2)
    .map(([b]) => svg.querySelector('title').textContent + ': ' + a + ' / ' + b));
})
"""


@pytest.fixture(scope="module")
def url(store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    if find_chromium() is None and os.environ.get("CI") != "true":
        pytest.skip("chromium is not installed: the report was not looked at in a browser")
    return write_report(store, tmp_path_factory.mktemp("page")).index.as_uri()


def look(url: str, script: str, *, width: int = DESKTOP, dark: bool = False) -> Visit:
    return visit(url, width=width, height=844, dark=dark, script=script, full_page=False)


def test_the_page_loads_alone_and_in_silence(url: str) -> None:
    seen = look(url, "document.querySelectorAll('svg').length")
    assert seen.value == 6
    assert seen.console == []
    assert [request for request in seen.requests if not request.startswith("data:")] == [url]


@pytest.mark.parametrize("width", [320, PHONE, DESKTOP])
def test_nothing_sticks_out_sideways(url: str, width: int) -> None:
    scroll_width, inner_width, sticking_out = look(url, OVERFLOW, width=width).value
    assert inner_width == width
    assert scroll_width <= width
    assert sticking_out == []


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_is_readable_in_both_schemes(url: str, dark: bool) -> None:
    ratio, text = look(url, LOWEST_CONTRAST, dark=dark).value
    assert ratio >= 4.5, text


def test_the_dark_scheme_is_dark(url: str) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    assert look(url, colour, dark=True).value == "rgb(22, 22, 26)"
    assert look(url, colour, dark=False).value == "rgb(255, 255, 255)"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_no_two_labels_of_a_picture_overlap(url: str, width: int) -> None:
    assert look(url, OVERLAPS, width=width).value == []


def test_the_readmes_picture_is_taken_in_both_schemes(url: str, tmp_path: Path) -> None:
    folder = Path(url.removeprefix("file://")).parent
    tool = Path(__file__).parents[3] / "tools" / "report_picture.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(folder), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    light, dark = ((tmp_path / f"report-{scheme}.png").read_bytes() for scheme in ("light", "dark"))
    assert light != dark
    assert len(light) < 500_000
