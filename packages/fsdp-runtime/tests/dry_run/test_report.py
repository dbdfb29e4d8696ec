"""Text, charts and pages show the contents of an estimate, without external resources."""

from __future__ import annotations

import ast
import io
import re
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import colormaps

from fsdp_runtime import BackendError, MeshSpec, cli
from fsdp_runtime.cli import ProgressLine
from fsdp_runtime.dry_run import Estimate, Memory, MemoryBreakdown, Peak
from fsdp_runtime.dry_run.compare import rank_candidates
from fsdp_runtime.dry_run.report import html
from fsdp_runtime.dry_run.report.charts import chart_picture, charts_of
from fsdp_runtime.dry_run.report.format import format_bytes
from fsdp_runtime.dry_run.report.html import html_report
from fsdp_runtime.dry_run.report.sections import (
    CATEGORY_NAMES,
    estimate_sections,
    sizes_by_name,
    sweep_sections,
    text_lines,
)
from fsdp_runtime.dry_run.sweep_types import Candidate, Sweep
from fsdp_runtime.mesh.spec import FLATTENED
from harness.estimates import GIB, made_estimate, made_settings, made_traffic


def _text(estimate: Estimate) -> str:
    return "\n".join(text_lines(estimate_sections(estimate)))


def _made_sweep() -> Sweep:
    ways = [
        (MeshSpec(dp_shard=64), made_estimate(device_memory=30 * GIB)),
        (MeshSpec(dp_shard=8, tp=8), made_estimate(peak=20 * GIB, device_memory=30 * GIB)),
    ]
    plain = [Candidate(mesh=mesh, sequence_parallel=False, activation_checkpointing="block") for mesh, _ in ways]
    found = [way.with_estimate(estimate, device_flops=None) for way, (_, estimate) in zip(plain, ways, strict=True)]
    refused = [
        Candidate(mesh=MeshSpec(tp=64), sequence_parallel=cut, activation_checkpointing="none", error="8 <heads>")
        for cut in (False, True)
    ]
    refused.append(
        Candidate(mesh=MeshSpec(tp=32), sequence_parallel=False, activation_checkpointing="none", error="8 <heads>")
    )
    return rank_candidates(64, [*found, *refused])


def test_every_category_of_memory_has_a_name_and_a_row() -> None:
    assert set(CATEGORY_NAMES) == set(MemoryBreakdown().by_category())
    nbytes = MemoryBreakdown(**{name: 2**20 * (at + 1) for at, name in enumerate(CATEGORY_NAMES)})
    peak = Peak(phase="loss", module="", operator="aten.exp.default", nbytes=nbytes)
    memory = Memory(
        resident=MemoryBreakdown(),
        after_forward=nbytes,
        after_backward=nbytes,
        phases=(peak,),
        host=MemoryBreakdown(parameters=7),
    )
    text = _text(made_estimate(memory=memory))
    assert all(
        re.search(rf"^  {name} .*\b{re.escape(format_bytes(size))}", text, re.MULTILINE)
        for name, size in sizes_by_name(nbytes).items()
    )
    assert "on the host" in text
    assert "peak: loss (aten.exp.default)" in text


def test_the_verdict_has_the_difference_and_the_advice() -> None:
    assert "Fits: 34.0 GiB of 80.0 GiB, 46.0 GiB to spare" in _text(made_estimate(device_memory=80 * GIB))
    text = _text(made_estimate(device_memory=30 * GIB))
    assert "Does not fit: 34.0 GiB of 30.0 GiB, 4.00 GiB too much" in text
    assert "  micro_batch=1: up to 2.00 GiB less\n  logprobs='linear'\n" in text
    assert "Device memory: 34.0 GiB\n" in _text(made_estimate())


def test_traffic_is_added_up_over_phases_by_axis_and_kind() -> None:
    lines = _text(made_estimate()).splitlines()
    begin = lines.index("Traffic per step")
    assert [line.split() for line in lines[begin + 2 : begin + 6]] == [
        ["tp", "all_gather", "8", "20", "2.00", "MiB", "14.0", "MiB", "250", "ms"],
        ["tp", "reduce_scatter", "8", "10", "1.00", "MiB", "7.00", "MiB", "-"],
        ["dp_shard", "all_gather", "8", "10", "1.00", "MiB", "7.00", "MiB", "-"],
        ["all", "28.0", "MiB", "250", "ms"],
    ]
    assert "Traffic per step: none" in _text(made_estimate(traffic=()))


def test_replicated_parameters_findings_and_assumptions_are_listed() -> None:
    text = _text(made_estimate())
    assert (
        "Replicated on every rank (all axes): 1.25 MiB\n  model.layers.*.input_layernorm.weight (80, 1.25 MiB)" in text
    )
    assert "warning: heads & <groups>" in text
    assert "model.layers.*.mlp: tokens spread evenly (aten.nonzero.default)" in text


def test_all_settings_are_shown() -> None:
    text = _text(made_estimate())
    assert text.startswith(
        "LlamaForCausalLM, 70.6 G parameters, rank 0 of 1,024 ranks (dp_replicate=4 dp_shard=32 tp=8)"
    )
    for part in (
        "1 x 8,192 tokens",
        "bf16 (master dtype fp32)",
        "sequence-parallel",
        "activation checkpointing: block",
        "2 and 3 of 80",
    ):
        assert part in text


def test_a_ranking_has_a_row_per_candidate_and_a_line_per_error() -> None:
    sections = sweep_sections(_made_sweep())
    header, first, second = sections[0].rows
    assert [row[1] for row in (first, second)] == ["dp_shard=8 tp=8", "dp_shard=64"]
    assert [row[header.index("fits")] for row in (first, second)] == ["yes", "no"]
    assert sections[1].lines == ["tp=64, tp=32 (3 candidates): 8 <heads>"]
    (shortened,) = sweep_sections(_made_sweep(), shown=1)[:1]
    assert len(shortened.rows) == 2
    assert "and 1 more" in shortened.lines


def test_a_ranking_names_axes_without_a_bandwidth() -> None:
    assert any("no bandwidth was given for dp_shard" in line for line in sweep_sections(_made_sweep())[0].lines)


def test_bars_add_up_to_the_numbers_and_empty_parts_are_omitted() -> None:
    memory, traffic = charts_of(made_estimate(device_memory=80 * GIB))
    assert [label for label, _ in memory.bars] == [
        *("between steps", "after forward", "after backward", "peak in forward", "peak in backward"),
        "device memory",
    ]
    assert sum(memory.bars[-1][1].values()) == 34 * GIB
    assert "logits" not in memory.parts
    assert memory.limit == memory.longest == 80 * GIB
    assert dict(traffic.bars) == {
        "tp": {"all_gather": 14 * 2**20, "reduce_scatter": 7 * 2**20},
        "dp_shard": {"all_gather": 7 * 2**20, "reduce_scatter": 0},
    }


def test_a_sweep_has_a_bar_per_candidate() -> None:
    memory, traffic = charts_of(_made_sweep())
    assert [label for label, _ in memory.bars] == ["1: dp_shard=8 tp=8, block", "2: dp_shard=64, block"]
    assert set(traffic.parts) == {"dp_shard", "tp"}


def test_charts_of_a_sweep_say_how_many_candidates_they_leave_out() -> None:
    plain = Candidate(mesh=MeshSpec(dp_shard=8), sequence_parallel=False, activation_checkpointing="none")
    many = rank_candidates(8, [plain.with_estimate(made_estimate(), device_flops=None)] * 30)
    for chart in charts_of(many):
        assert len(chart.bars) == 24
        assert chart.title.endswith("(the best 24 of 30 candidates)")
    assert not any("best" in chart.title for chart in charts_of(_made_sweep()))


def test_no_axis_has_the_colour_of_a_category_of_memory() -> None:
    memory, traffic = (
        {tuple(colour) for colour in colormaps[chart.colours].colors}  # type: ignore[attr-defined]
        for chart in charts_of(made_estimate())
    )
    assert len(memory) >= len(CATEGORY_NAMES)
    assert len(traffic) >= len(FLATTENED)
    assert not memory & traffic


def test_labels_of_bars_are_in_the_unit_of_the_axis_unless_too_small_for_it() -> None:
    drawn = _drawn(chart_picture(made_estimate(peak=3000 * GIB), "svg"))
    assert "2.93 TiB" in drawn
    small = {text for text in drawn if text.endswith("GiB")}
    assert small == {"3.00 GiB"}, "a thousandth of the unit"


def _drawn(svg: bytes) -> list[str]:
    """The texts in a picture."""
    return [text.strip() for element in ElementTree.fromstring(svg).iter() if (text := element.text or "").strip()]


class _Tags(HTMLParser):
    """Checks that what is opened is closed, and collects names and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("found", [made_estimate(device_memory=30 * GIB), _made_sweep(), rank_candidates(8, [])])
def test_a_page_is_well_formed_and_has_no_external_resources(found: Estimate | Sweep) -> None:
    page = html_report(found)
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert all(str(address).startswith("data:image/svg+xml;base64,") for address in tags.addresses)
    assert not tags.seen & {"script", "link", "iframe"}
    assert not re.search(r"https?:|url\(|@import", page)
    assert "prefers-color-scheme: dark" in page


def test_names_in_a_page_are_escaped() -> None:
    page = html_report(made_estimate(settings=made_settings(model="A<b>")))
    assert "heads &amp; &lt;groups&gt;" in page
    assert "A&lt;b&gt;" in page
    assert "<b>" not in page
    assert "8 &lt;heads&gt;" in html_report(_made_sweep())


def test_a_page_draws_every_bar_and_the_device_memory() -> None:
    page = html_report(made_estimate(device_memory=80 * GIB, traffic=(made_traffic(),)))
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    drawn = _drawn(b64decode(image))
    assert {"peak in backward", "34.0 GiB", "activations", "device memory 80.0 GiB", "all_gather"} <= set(drawn)


def test_a_page_without_matplotlib_has_the_numbers_and_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = html_report(made_estimate(device_memory=80 * GIB))
    assert "pip install &#x27;fsdp-runtime[charts]&#x27;" in page
    assert "<img" not in page
    assert "Fits: 34.0 GiB of 80.0 GiB" in page


def test_a_png_is_drawn_of_an_estimate_and_of_a_sweep() -> None:
    for found in (made_estimate(device_memory=80 * GIB), _made_sweep(), rank_candidates(8, [])):
        assert chart_picture(found, "png").startswith(b"\x89PNG")


def test_a_png_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendError, match=r"pip install 'fsdp-runtime\[charts\]'"):
        chart_picture(made_estimate(), "png")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_several_elsewhere() -> None:
    pipe, terminal = io.StringIO(), _Terminal()
    for stream in (pipe, terminal):
        progress = ProgressLine(stream)
        progress("first", 1, 4)
        progress("second", 2, 4)
        progress.close()
    assert pipe.getvalue() == "1/4 first\n2/4 second\n"
    assert terminal.getvalue().startswith("\r\x1b[K1/4 first\r\x1b[K2/4 second")
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_long_progress_says_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = ProgressLine(stream)
    progress("42 dry runs", 0, 42)
    now = 20.0
    progress("tp=8", 1, 42)
    now = 820.0
    progress("tp=4", 41, 42)
    assert stream.getvalue() == "0/42 42 dry runs\n1/42 tp=8 (about 14 min left)\n41/42 tp=4\n"


def test_reports_import_nothing_but_results() -> None:
    folder = Path(html.__file__).parent
    allowed = {"report", "sweep_types", "types"}
    imported = {
        node.module.split(".")[2]
        for file in folder.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_runtime.dry_run.")
    }
    assert imported == allowed
