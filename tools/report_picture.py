"""Take pictures of a report for the README: the top of the page, light and dark.

    python tools/report_picture.py quickstart/report docs/img

Writes OUT/report-light.png and OUT/report-dark.png. Needs Chromium.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.chromium import find_chromium, visit

WIDTH, SCALE = 1120, 1.5
#: The headline and the first four pictures; checks and tables are for the page itself.
PREPARE = """(() => {
  document.querySelectorAll('main .scroll, section[aria-labelledby=checks]').forEach(e => e.remove());
  [...document.querySelectorAll('figure')].slice(4).forEach(e => e.remove());
  return Math.ceil(document.querySelector('.figures').getBoundingClientRect().bottom + scrollY) + 8;
})()"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="folder that holds index.html")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    options = parser.parse_args()
    page = (options.report / "index.html").resolve()
    if not page.is_file():
        print(f"{page}: no such file; write a report first", file=sys.stderr)
        return 2
    if find_chromium() is None:
        print("chromium is not installed", file=sys.stderr)
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    for scheme in ("light", "dark"):
        seen = visit(
            page.as_uri(), width=WIDTH, dark=scheme == "dark", scale=SCALE, script=PREPARE, crop=True
        )
        target = options.out / f"report-{scheme}.png"
        picture = Image.open(io.BytesIO(seen.picture)).convert("RGB")
        picture.quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
        print(target)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
