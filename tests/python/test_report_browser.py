"""The report's page in a real browser: nothing loaded, no complaint, nothing cut off, readable in both schemes.

Skipped where there is no browser; .ci/run sets KP_REQUIRE_BROWSER, under which a missing one is a failure.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import NAMES, Browser, find_browser
from kernel_pytorch._optimize.report import Report
from report_sample import sample

WIDTHS = (360, 1200)
SCHEMES = ("light", "dark")

# Texts whose colour is too close to what lies behind them (WCAG: a ratio of 4.5), as "ratio text". What lies behind a
# text of the drawing is the shape before it, or the card.
CONTRAST = """(() => {
  const channel = value => value <= 10 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const color = parse(getComputedStyle(element).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const poor = [];
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.getClientRects().length || element.tagName === 'title') continue;
    const style = getComputedStyle(element);
    const shape = element.matches('.point text') && element.previousElementSibling;
    const front = parse(element.tagName === 'text' ? style.fill : style.color);
    const back = shape ? parse(getComputedStyle(shape).fill) : behind(element);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.push(ratio.toFixed(2) + ' ' + walk.currentNode.data.slice(0, 40));
  }
  return {seen, poor};
})()"""

# Texts and shapes of drawings that reach beyond their drawing.
CUT_OFF = """[...document.querySelectorAll('svg.roofline')].flatMap(svg => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll('text, circle, rect')].filter(part => {
    const box = part.getBoundingClientRect();
    return box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom;
  }).map(part => part.textContent || part.tagName);
})"""

# The middle of each point, and how far below the roof (positive) it lies, in pixels of the drawing.
POINTS = """[...document.querySelectorAll('svg.roofline .point')].map(point => {
  const shape = point.querySelector('circle, rect').getBBox();
  const x = shape.x + shape.width / 2, y = shape.y + shape.height / 2;
  const roof = [...document.querySelector('svg.roofline .roof').points];
  const next = roof.findIndex((corner, index) => index > 0 && corner.x >= x);
  const [a, b] = [roof[next - 1], roof[next]];
  const height = a.y + (b.y - a.y) * (x - a.x) / (b.x - a.x);
  return {number: +point.querySelector('text').textContent, side: point.classList[1], kind: point.classList[2],
          told: point.querySelector('title').textContent, below: y - height};
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        words = f"no browser here: none of {', '.join(NAMES)} (apt-get install --no-install-recommends chromium)"
        if os.environ.get("KP_REQUIRE_BROWSER"):
            pytest.fail(words)
        pytest.skip(words)
    with Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """The sample's page, with a name long enough to push a careless layout apart."""
    data = sample()
    data["environment"]["device"] = "NVIDIA_" + "H200_" * 40
    for side in data["kernels"].values():
        side[0]["name"] = "gemm<" + "Layout_and_Tile_" * 30 + ">"
    data["command"] += " --input " + "1x2048:int64," * 30
    path = Report(data).save(tmp_path_factory.mktemp("report") / "report.html")
    browser.open(path.as_uri())
    assert browser.requests() == [path.as_uri()]
    assert browser.evaluate("document.title") == data["title"]
    return browser


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_and_nothing_is_cut_off(page: Browser, width: int, scheme: str) -> None:
    page.show(width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.scrollingElement.scrollWidth") <= width
    assert page.evaluate(CUT_OFF) == []
    assert page.complaints() == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_texts_can_be_read(page: Browser, scheme: str) -> None:
    page.show(1200, scheme)
    found = page.evaluate(CONTRAST)
    assert found["poor"] == [] and found["seen"] > 150


def test_the_reader_s_scheme_is_followed(page: Browser, tmp_path: Path) -> None:
    pictures, grounds = [], []
    for scheme in SCHEMES:
        page.show(1200, scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        pictures.append(page.screenshot())
    assert grounds == ["rgb(246, 245, 242)", "rgb(20, 23, 26)"]
    assert pictures[0] != pictures[1] and all(
        picture.startswith(b"\x89PNG") and len(picture) > 50_000 for picture in pictures
    )


def test_points_lie_where_the_numbers_say(page: Browser) -> None:
    points = page.evaluate(POINTS)
    after = [(number, "after") for number in (1, 2, 3, 4)]
    before = [(number, "before") for number in (1, 5, 6)]  # the product, and two kernels that were replaced
    assert sorted((point["number"], point["side"]) for point in points) == sorted(after + before)
    # All are below the roofs, by the logarithm of their share of it.
    decade = page.evaluate(
        "(() => { const y = [...document.querySelectorAll('svg.roofline line.grid')]"
        ".filter(line => line.y1.baseVal.value === line.y2.baseVal.value).map(line => line.y1.baseVal.value);"
        " return y[0] - y[1]; })()"
    )
    for point in points:
        share = 10 ** (-point["below"] / decade)
        told = float(point["told"].rsplit(", ", 1)[1].removesuffix(" % of the roof")) / 100
        assert share == pytest.approx(told, abs=0.02), point
    assert {point["kind"] for point in points} == {"ours", "other"}


def test_a_broken_page_is_noticed(browser: Browser, tmp_path: Path) -> None:
    """The checks above can fail."""
    page = tmp_path / "broken.html"
    page.write_text(
        "<!doctype html><meta http-equiv=Content-Security-Policy "
        "content=\"default-src 'none'; style-src 'unsafe-inline'\"><title>x</title>"
        "<body style='background: #fff'><p style='width: 4000px; color: #eee'>wide</p>"
        "<img src='missing.png'><script>1</script>"
    )
    browser.show(1200, "light")
    browser.open(page.as_uri())
    assert len(browser.complaints()) >= 2  # the picture and the script
    assert browser.evaluate("document.scrollingElement.scrollWidth") >= 4000
    assert browser.evaluate(CONTRAST)["poor"]
