"""The page of weights on big meshes: a count gives its first rows again."""

from __future__ import annotations

from docs.generate import weight_traffic


def test_a_count_gives_the_first_rows_of_the_page() -> None:
    assert "\n".join(weight_traffic.lines(weight_traffic.ROWS[0])) in weight_traffic.PAGE.read_text()


def test_the_page_has_all_rows_and_the_present_introduction() -> None:
    text = weight_traffic.PAGE.read_text()
    assert text.startswith(weight_traffic.INTRODUCTION)
    assert all(f"| {row.label} | save |" in text for row in weight_traffic.ROWS)
