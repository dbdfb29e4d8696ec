"""A report as one HTML file without scripts or external resources, in the reader's light or dark theme."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from html import escape

from fsdp_runtime.dry_run.report.charts import MAX_BARS, chart_picture, charts_of
from fsdp_runtime.dry_run.report.sections import Section, estimate_sections, sweep_sections
from fsdp_runtime.dry_run.sweep_types import Sweep
from fsdp_runtime.dry_run.types import Estimate
from fsdp_runtime.errors import BackendError

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
ul { margin: .2rem 0; padding-left: 1.2rem; }
.wide { width: max-content; min-width: 100%; max-width: calc(100vw - 2rem); position: relative; left: 50%;
        transform: translateX(-50%); overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; width: 100%; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
.word { text-align: left; }
img { display: block; width: 100%; margin: 1rem 0; }
"""


def html_report(result: Estimate | Sweep) -> str:
    """Return the page: all sections of an estimate, or a sweep's ranking and the sections of its best candidate."""
    # The page has charts if matplotlib is installed; otherwise it names the extra that installs matplotlib.
    if isinstance(result, Sweep):
        title = f"Dry runs on {result.world_size:,} ranks"
        best = result.best
        more = len(result.estimated) > MAX_BARS
        body = [
            f"<h1>{title}</h1>",
            _picture(result),
            *([f"<p>The charts show the first {MAX_BARS} candidates.</p>"] if more else []),
            *_sections(sweep_sections(result)),
        ]
        if best is not None and best.estimate is not None:
            body += [f"<h1>Best candidate: {escape(best.label)}</h1>", *_estimate(best.estimate)]
    else:
        title = f"Dry run of {result.settings.model}"
        body = [*_estimate(result, heading="h1")]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    page = "\n".join(body)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>\n{page}\n</body></html>\n'
    )


def _estimate(estimate: Estimate, heading: str = "h2") -> Iterator[str]:
    settings, verdict, *rest = estimate_sections(estimate)
    yield from _sections([settings], heading)
    yield from _sections([verdict])
    yield _picture(estimate)
    yield from _sections(rest)


def _picture(result: Estimate | Sweep) -> str:
    if not charts_of(result):
        return ""
    try:
        image = b64encode(chart_picture(result, "svg")).decode()
    except BackendError as error:
        return f"<p>{escape(str(error))}</p>"
    return f'<img alt="Memory by category, and traffic by axis" src="data:image/svg+xml;base64,{image}">'


def _sections(sections: Iterable[Section], heading: str = "h2") -> Iterator[str]:
    for section in sections:
        status = f' class="{section.status}"' if section.status else ""
        yield f"<{heading}{status}>{escape(section.heading)}</{heading}>"
        if section.rows:
            yield '<div class="wide"><table>'
            for index, row in enumerate(section.rows):
                tag = "td" if index else "th"
                words, numbers = row[: section.left], row[section.left :]
                cells = [f'<{tag} class="word">{escape(word)}</{tag}>' for word in words]
                cells += [f"<{tag}>{escape(number)}</{tag}>" for number in numbers]
                yield f"<tr>{''.join(cells)}</tr>"
            yield "</table></div>"
        if section.lines:
            yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in section.lines)}</ul>"
