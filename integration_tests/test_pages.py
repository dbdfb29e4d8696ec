"""Pages: the collector of their code, the width of tables, wordings, and the list of folders."""

from __future__ import annotations

import re
import runpy
import traceback
from pathlib import Path

import pytest

from harness import pages, prose

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")]
LONGEST_CELL = 100
#: Lines with a wording that hides the noun of a sentence, over the pages without measurements.  It only goes down.
MOST_WORDINGS = 25
MEASUREMENTS = r"docs/(coverage|recipes)/|docs/(benchmarks|compatibility|coverage|published-setups|refusals|weight-t)"

PAGE = """# A page

```python
total = 1 + 1
print(total)  # 2
```

- in a list:

    ```python
    print("a", total, sep="-")  # a-3
    # no promise:
    print("anything")
    ```

```bash
not python
```

```python
# torchrun --nproc-per-node 2 FILE.py
print("from", "here", "on")  # from ... on
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_blocks_have_one_language_and_their_first_lines(page: Path) -> None:
    assert [block.line for block in pages.blocks(page, "python")] == [4, 11, 21]
    assert [block.text for block in pages.blocks(page, "bash")] == ["not python\n"]


def test_parts_begin_at_blocks_with_a_command(page: Path) -> None:
    assert [(part.ranks, len(part.blocks)) for part in pages.parts(page)] == [(0, 2), (2, 1)]


def test_run_part_reports_a_wrong_output_with_its_line(page: Path, tmp_path: Path) -> None:
    first, second = pages.parts(page)
    assert pages.run_part(first, {}, tmp_path) == ["page.md:11 promises 'a-3' and prints 'a-2'"]
    assert pages.run_part(second, {}, tmp_path) == []


def test_run_part_shares_a_namespace_between_blocks(page: Path, tmp_path: Path) -> None:
    names = {"given": 1}
    pages.run_part(pages.parts(page)[0], names, tmp_path)
    assert names == {"given": 1}


def test_run_traces_an_error_to_the_line_of_the_page(tmp_path: Path) -> None:
    path = tmp_path / "broken.md"
    path.write_text("text\n\n```python\nfine = 1\nraise KeyError('here')\n```\n")
    with pytest.raises(KeyError) as caught:
        pages.run(pages.blocks(path, "python"), {})
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.lineno) == ("broken.md", 5)


def _without_code(page: Path) -> str:
    """Return a page's text without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def _tables(page: Path) -> list[list[list[str]]]:
    """Return a page's tables as rows of cells; a pipe behind a backslash is part of a cell."""
    tables = re.findall(r"(?:^ *\|.*\|\n)+", _without_code(page), re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", row.strip()[1:-1]) for row in table.splitlines()] for table in tables]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_have_short_cells_and_one_number_of_columns(page: Path) -> None:
    rows = [(len(table[0]), row) for table in _tables(page) for row in table]
    assert [cell for _, row in rows for cell in row if len(cell.strip()) > LONGEST_CELL] == []
    assert [row for columns, row in rows if len(row) != columns] == []


def test_count_of_wordings_in_pages_stays_below_its_ceiling() -> None:
    texts = [_without_code(page) for page in PAGES if not re.match(MEASUREMENTS, str(page.relative_to(ROOT)))]
    counts = prose.count(line for text in texts for line in text.splitlines())
    assert sum(counts.values()) - counts["the local found"] <= MOST_WORDINGS


def test_tables_leaves_out_code_and_escaped_pipes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b\\|c |\n|---|---|\n\n```text\n| code |\n```\n")
    assert _tables(page) == [[[" a ", " b\\|c "], ["---", "---"]]]


def test_architecture_page_names_exactly_the_folders_of_the_sources() -> None:
    named = re.findall(r"^\| `(\w[\w/]*)/` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    sources = ROOT.glob("packages/*/src")
    folders = [str(file.parent.relative_to(source)) for source in sources for file in source.rglob("__init__.py")]
    assert sorted(named) == sorted(folders)


def test_published_rows_equal_the_table_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / "docs/generate/published_rows.py"
    monkeypatch.syspath_prepend(script.parent)
    namespace = runpy.run_path(str(script))
    table = namespace["table"](namespace["rows"]())
    assert table in (ROOT / "docs/published-setups.md").read_text()
    for runs, error, within in re.findall(r"(\d+) runs: median error ([\d.]+)%.* (\d+) within 12 %", table):
        guide = " ".join((ROOT / "docs/guides/dry-run.md").read_text().split())
        assert f"Of {runs} published runs the median error is {error} %, and {within} are within 12 %" in guide
