"""Make matplotlib's SVG fit to stand inside a page: themed by CSS, labelled, with ids of its own."""

from __future__ import annotations

import re
from html import escape

from ddtree_ops.compare.theme import COLOURS, STAND_IN


def inline(svg: str, *, name: str, title: str, description: str) -> str:
    """The ``<svg>`` element for inlining.

    Stand-in colours become CSS variables (so that the page's scheme applies), text takes the page's font,
    ids get ``name`` as a prefix (two pictures in one page would otherwise share clip paths), and size is
    left to the page. ``title`` and ``description`` are what a screen reader says.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    for role in COLOURS:
        body = body.replace(STAND_IN[role], f"var(--c-{role})")
    body = re.sub(r'font: ((?:[a-z]+ )*)([\d.]+)px [^;"]*', r"font: \1\2px var(--sans)", body)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace('xlink:href="#', f'xlink:href="#{name}-').replace("url(#", f"url(#{name}-")
    label = (
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-desc">{escape(description)}</desc>'
    )
    head = re.match(r"<svg[^>]*>", body)
    if head is None:
        raise ValueError("not an SVG document")
    view = re.search(r'viewBox="[^"]*"', head.group())
    start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'{view.group() if view else ""} role="img" aria-labelledby="{name}-title {name}-desc">'
    )
    return start + label + body[head.end() :].strip()
