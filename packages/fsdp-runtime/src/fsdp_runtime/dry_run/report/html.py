"""A report as one HTML file without scripts or external resources, in the reader's light or dark theme."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from fsdp_runtime.dry_run.report.charts import MAX_BARS, charts_of
from fsdp_runtime.dry_run.report.sections import Section, estimate_sections, sweep_sections
from fsdp_runtime.dry_run.report.svg import legend_of, svg_of
from fsdp_runtime.dry_run.sweep_types import Sweep
from fsdp_runtime.dry_run.types import Estimate

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1d2733; --soft: #5c6875; --rule: #dde3ea;
        --good: #1e7d45; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14191f; --ink: #e4e9ee; --soft: #97a3b0; --rule: #2c3640; --good: #63c98c; --bad: #ff8a80; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; background: var(--ground); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .3rem; }
h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
h2.good { color: var(--good); } h2.bad { color: var(--bad); }
p, li { color: var(--soft); margin: .15rem 0; overflow-wrap: anywhere; }
ul.lines { margin: .2rem 0; padding-left: 1.2rem; }
.wide { width: max-content; min-width: 100%; max-width: calc(100vw - 2rem); position: relative; left: 50%;
        transform: translateX(-50%); overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100%; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.word { text-align: left; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
.part { fill: var(--light); stroke: var(--ground); stroke-width: .6; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: .3rem 0; }
.legend li { color: var(--ink); font-size: .88rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; background: var(--light); }
@media (prefers-color-scheme: dark) { .part { fill: var(--dark); } .legend i { background: var(--dark); } }
.grid { stroke: var(--rule); } .tick, .unit { fill: var(--soft); }
.tick, .limit-name { text-anchor: middle; } .label, .unit { text-anchor: end; }
.limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; } .limit-name { fill: var(--bad); }
"""


def html_report(found: Estimate | Sweep) -> str:
    """Return the page: all sections of an estimate, or a sweep's ranking and the sections of its best candidate."""
    if isinstance(found, Sweep):
        title = f"Dry runs on {found.world_size:,} ranks"
        best = found.best
        body = [
            f"<h1>{title}</h1>",
            *_charts(found),
            *([f"<p>The charts show the first {MAX_BARS} candidates.</p>"] if len(found.estimated) > MAX_BARS else []),
            *_sections(sweep_sections(found)),
        ]
        if best is not None and best.estimate is not None:
            body += [
                f"<h1>Best candidate: {escape(best.label)}</h1>",
                *_charts(best.estimate),
                *_estimate(best.estimate),
            ]
    else:
        title = f"Dry run of {found.settings.model}"
        first, *others = estimate_sections(found)
        heading = [f"<h1>{escape(first.heading)}</h1>", *(f"<p>{escape(line)}</p>" for line in first.lines)]
        verdict, *rest = others
        body = [*heading, *_sections([verdict]), *_charts(found), *_sections(rest)]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    page = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{page}\n</body></html>\n'
    )


def _estimate(estimate: Estimate) -> Iterator[str]:
    yield from _sections(estimate_sections(estimate))


def _charts(found: Estimate | Sweep) -> Iterator[str]:
    for chart in charts_of(found):
        yield f"<h2>{escape(chart.title)}</h2>"
        yield legend_of(chart)
        yield svg_of(chart)


def _sections(sections: Iterable[Section]) -> Iterator[str]:
    for section in sections:
        status = f' class="{section.status}"' if section.status else ""
        yield f"<h2{status}>{escape(section.heading)}</h2>"
        if section.rows:
            yield from _table(section)
        if section.lines:
            items = "".join(f"<li>{escape(line)}</li>" for line in section.lines)
            yield f'<ul class="lines">{items}</ul>'


def _table(section: Section) -> Iterator[str]:
    yield '<div class="wide"><table>'
    for index, row in enumerate(section.rows):
        tag = "td" if index else "th"
        openings = [f'<{tag} class="word">' if column < section.left else f"<{tag}>" for column in range(len(row))]
        cells = (f"{opening}{escape(cell)}</{tag}>" for opening, cell in zip(openings, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</table></div>"
