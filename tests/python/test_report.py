"""A report's three views say the same, admit what is unclear, and let nothing of the data through unescaped."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest
from kernel_pytorch._optimize.report import Report
from kernel_pytorch._optimize.report.numbers import duration, percent, rate, roof_share, size, small
from report_sample import sample

NASTY = "<script>alert('x')</script>&\"'\x1b[31m"


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (duration(0), "0.00 us"),
        (duration(0.456), "0.456 us"),
        (duration(12.34), "12.3 us"),
        (duration(999.7), "1.00 ms"),
        (duration(5820), "5.82 ms"),
        (duration(3.2e6), "3.20 s"),
        (duration(7.2e9), "7200 s"),
        (duration(math.nan), "nan"),
        (size(0), "0 B"),
        (size(1536), "1.50 KiB"),
        (size(1.9e9), "1.77 GiB"),
        (rate(4.2e12, "B"), "4.20 TB/s"),
        (small(0), "0"),
        (small(0.0072), "7.2e-3"),
        (small(1e-10), "1e-10"),
        (small(math.inf), "inf"),
        (percent(0.0), "0 %"),
        (percent(0.001), "< 1 %"),
        (percent(0.58), "58 %"),
    ],
)
def test_numbers_are_short(written: str, wanted: str) -> None:
    assert written == wanted


def test_text_says_what_was_gained() -> None:
    text = str(Report(sample()))
    assert text.splitlines()[0] == "Llama block, inference: 1.42x as fast"
    assert re.search(r"^before +5\.82 ms +5\.70 ms +5\.99 ms +1\.77 GiB +1284$", text, re.MULTILINE)
    assert re.search(r"^after +4\.11 ms .* 420 +1\.42x$", text, re.MULTILINE)
    assert "8x  residual + RMSNorm" in text and "predicted 156 us less" in text
    assert "cross entropy: the goal is inference: there is no loss (lm_head)" in text
    assert "the whole model, gradient, 7.2e-3 of 1e-2" in text
    assert "Tuned, 1 of 2 problems changed:\n  4x  matmul batch=1 m=2048" in text
    assert "sm90_wgmma tile=128x256 -> sm90_wgmma tile=256x128: 512 us -> 471 us, 1.09x" in text
    assert "not tuned: no time left in the budget" in text
    assert text.endswith("Again: kpt optimize --demo llama --goal inference --html report.html")
    assert text.isascii() and max(map(len, text.splitlines())) <= 120


def test_overlapping_ranges_are_not_called_faster() -> None:
    data = sample()
    data["measurements"][1] |= {"median_us": 5700.0, "low_us": 5600.0, "high_us": 5800.0}
    report = Report(data)
    assert str(report).splitlines()[0].endswith("no clear difference (1.02x, within the spread)")
    assert "1.02x ?" in str(report)
    assert "ranges overlap" in report.to_html() and "Time, faster" not in report.to_html()


def test_a_slower_model_is_called_slower() -> None:
    data = sample()
    data["measurements"][1] |= {"median_us": 11640.0, "low_us": 11600.0, "high_us": 11700.0}
    report = Report(data)
    assert "slower: 0.50x as fast" in str(report)
    assert "Time, slower" in report.to_html()
    assert report.speedup == 0.5


def test_noise_of_an_unchanged_model_is_no_result() -> None:
    report = Report(sample() | {"replacements": [], "tuning": []})
    assert str(report).splitlines()[0].endswith(": nothing was replaced, the model is as it was")
    assert "Time, faster" not in report.to_html() and "nothing was replaced; measured" in report.to_html()
    unmeasured = Report(sample() | {"measurements": []})
    assert "not measured before and after" in str(unmeasured)


def test_failed_numbers_come_first() -> None:
    data = sample()
    data["numerics"][3] |= {"relative": math.nan, "max_abs": math.inf, "ok": False}
    report = Report(data)
    assert report.worst_numerics is not None and report.worst_numerics["path"] == "model.layers.1.input_layernorm"
    assert "1 BEYOND TOLERANCE" in str(report)
    assert "Beyond tolerance" in report.to_html()


def test_an_empty_report_says_so() -> None:
    data = sample() | {"measurements": [], "replacements": [], "refusals": [], "numerics": [], "roofs": None}
    data |= {"tuning": []}
    data |= {"kernels": {"before": [], "after": []}, "notes": [], "command": "", "environment": {}}
    report = Report(data)
    assert "nothing was replaced, the model is as it was" in str(report) and report.speedup is None
    html = report.to_html()
    for words in ("Nothing was measured", "No profile was taken", "not measured", "Nothing was compared"):
        assert words in html


def test_roof_share_takes_the_slower_limit() -> None:
    roofs = {"copy_bytes_per_second": 1e12, "matmul_flops_per_second": 1e14, "dtype": "bf16"}
    kernel = {"name": "k", "calls": 2, "total_us": 10.0, "bytes": 5e6, "flops": 2e8, "ours": True}
    assert roof_share(kernel, roofs) == pytest.approx(0.5)  # 5 us of copying, 2 us of products
    assert roof_share(kernel | {"bytes": None}, roofs) == pytest.approx(0.2)
    assert roof_share(kernel | {"bytes": None, "flops": None}, roofs) is None
    assert roof_share(kernel, None) is None
    assert roof_share(kernel | {"total_us": 4.9}, roofs) == 1.0  # two measurements of the same speed
    assert roof_share(kernel | {"total_us": 4.0}, roofs) is None  # faster than what was measured to be possible


def test_json_goes_there_and_back(tmp_path) -> None:
    data = sample()
    data["numerics"][0] |= {"relative": math.inf, "max_abs": math.inf, "ok": False}
    report = Report(data)
    assert report.save(tmp_path / "report.json") == tmp_path / "report.json"
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert Report.load(tmp_path / "report.json").data == report.data
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_report_of_a_version_that_did_not_tune_is_read() -> None:
    data = sample()
    del data["tuning"]
    report = Report(data)
    assert report.data["tuning"] == []
    assert "Tuned" not in str(report)
    assert "Nothing: no problem with a choice" in report.to_html()


def test_unknown_times_of_tuning_are_said_to_be_unknown() -> None:
    data = sample()
    data["tuning"][0] |= {"from_us": None, "to_us": None}
    report = Report(data | {"replacements": []})
    assert "sm90_wgmma tile=256x128: ? -> ?, 1.09x" in str(report)
    assert "&ndash; → &ndash;" in report.to_html()
    assert report.is_changed and "nothing was replaced" not in str(report)


def test_a_name_decides_the_view(tmp_path) -> None:
    report = Report(sample())
    assert report.save(str(tmp_path / "a.HTML")).read_text().startswith("<!doctype html>")
    assert report.save(tmp_path / "a.txt").read_text() == str(report)
    with pytest.raises(ValueError, match=r"'a\.pdf': the name must end in \.html, \.json or \.txt"):
        report.save(tmp_path / "a.pdf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"title": None}, "title is None; it must be a text"),
        ({"measurements": {}}, "measurements is {}; it must be a list"),
        ({"model": {"name": "m", "inputs": []}}, "model.parameters is missing"),
        ({"kernels": {"before": []}}, "kernels.after is missing"),
        ({"roofs": {"copy_bytes_per_second": "fast"}}, "roofs.copy_bytes_per_second is 'fast'; it must be a number"),
        ({"numerics": [{"path": "", "quantity": "output"}]}, r"numerics\[0\].max_abs is missing"),
        ({"tuning": [{"op": "matmul"}]}, r"tuning\[0\].problem is missing"),
        ({"notes": "one"}, "notes is 'one'; it must be a list"),
        ({"environment": []}, "environment is"),
    ],
)
def test_wrong_data_is_named(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Report(sample() | change)


@pytest.mark.parametrize("text", ["", "[", "[]", "7", "[" * 100_000, b"\xff"])
def test_text_that_is_no_report_is_refused(text) -> None:
    with pytest.raises(ValueError, match="report: "):
        Report.from_json(text)


class _Tags(HTMLParser):
    """Every element in order, and whether each was closed where it had to be."""

    EMPTY = ("meta", "br", "rect", "line", "circle", "polygon", "polyline")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _nasty(value):
    if isinstance(value, dict):
        return {key: _nasty(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_nasty(item) for item in value]
    return NASTY if isinstance(value, str) else value


def test_nothing_of_the_data_becomes_markup() -> None:
    data = _nasty(sample())
    data["measurements"][0]["name"], data["measurements"][1]["name"] = "before", "after"
    data["environment"][NASTY] = NASTY
    report = Report(data)
    tags = _Tags(report.to_html())
    names = {name for name, _ in tags.seen}
    assert not names & {"script", "img", "iframe", "link", "object"}
    attributes = {key for _, attrs in tags.seen for key in attrs}
    assert not [key for key in attributes if key.startswith("on") or key in ("src", "style")]
    assert "\x1b" not in str(report)


def test_the_page_loads_nothing() -> None:
    tags = _Tags(Report(sample()).to_html())
    links = [attrs["href"] for name, attrs in tags.seen if name == "a"]
    ids = {attrs["id"] for _, attrs in tags.seen if "id" in attrs}
    assert links and all(link is not None and link.removeprefix("#") in ids for link in links)
    assert not [attrs for _, attrs in tags.seen if "src" in attrs]
    policy = next(attrs["content"] for name, attrs in tags.seen if attrs.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    assert "url(" not in Report(sample()).to_html()


def test_drawings_have_text_beside_them() -> None:
    tags = _Tags(Report(sample()).to_html())
    drawings = [attrs for name, attrs in tags.seen if name == "svg"]
    assert len(drawings) > 20
    assert all(attrs.get("aria-hidden") == "true" or attrs.get("aria-labelledby") for attrs in drawings)
    points = [attrs for name, attrs in tags.seen if name == "g" and str(attrs.get("class")).startswith("point")]
    assert len(points) == 7
