"""What every page is made of: its frame, cards, pictures and tables, as HTML by itself.

A page reads on a desktop, on a phone, in the dark and on paper. Pictures are read out by their
captions.

>>> cards([("8", "ε (exact)")])
"<div class='cards'><div class='card'><b>8</b><span>ε (exact)</span></div></div>"
>>> table([("features", ""), ("classes", ["no", "yes"]), ("mu", None)])
'<table><tr><td>features</td><td>none</td></tr><tr><td>classes</td><td>no, yes</td></tr></table>'
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from noshuffle.report.plots import Figure

_STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1f2933;max-width:60rem;margin:2rem auto;
padding:0 1rem;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2rem 0 .4rem}
h1,td,figcaption{overflow-wrap:anywhere}
.lead{color:#52606d;margin-top:0}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.card{border:1px solid #e4e7eb;border-radius:.5rem;padding:.6rem 1rem;min-width:7.5rem}
.card b{display:block;font-size:1.35rem}.card span{color:#52606d;font-size:.85rem}
.warn{border-left:4px solid #c8553d;padding:.5rem 1rem;background:#fdf3f0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));gap:1.2rem}
figure{margin:0}figure svg{width:100%;height:auto}figcaption{color:#52606d;font-size:.88rem}
table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;vertical-align:top}
td:first-child{color:#52606d;white-space:nowrap}
table+p,table+.lead{margin-top:1rem}code{font-size:.85rem;word-break:break-all}
@media(prefers-color-scheme:dark){body{background:#14191f;color:#e4e7eb}
.lead,.card span,figcaption,td:first-child{color:#9fb3c8}.card{border-color:#3e4c59}
.warn{background:#3b211b}figure svg{filter:invert(1) hue-rotate(180deg)}}
@media print{.grid{grid-template-columns:1fr 1fr}
figure,.card,tr,li{break-inside:avoid}h2{break-after:avoid}}
"""


def document(title: str, body: str) -> str:
    """A whole page that asks for nothing else."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def cards(told: Iterable[tuple[str, str]]) -> str:
    """Numbers at the top of a page, with what they are."""
    drawn = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for value, label in told
    )
    return f"<div class='cards'>{drawn}</div>"


def pictures(figures: Iterable[Figure]) -> str:
    """Pictures side by side where there is room, each with its caption, which is also its name."""
    drawn = "".join(
        f"<figure>{_named(svg, caption)}<figcaption>{escape(caption)}</figcaption></figure>"
        for svg, caption in figures
    )
    return f"<div class='grid'>{drawn}</div>"


def _named(svg: str, caption: str) -> str:
    """An image by that name to whoever has the page read out, instead of paths by the hundred."""
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(caption)}"', 1)


def warning(sentence: str) -> str:
    return f"<p class='warn'>{escape(sentence)}</p>"


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values; what is None is left out."""
    cells = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(_words(value))}</td></tr>"
        for key, value in rows
        if value is not None
    )
    return f"<table>{cells}</table>"


def _words(value: Any) -> str:
    if value in ("", [], {}):
        return "none"
    if isinstance(value, list) and not any(isinstance(one, list | dict) for one in value):
        return ", ".join(str(one) for one in value)
    return str(value)
