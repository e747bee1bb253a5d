"""The report's page in a real browser. Needs a Chromium (Debian: apt install chromium) and playwright."""

import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from balnorm.bench.study.report import write_report
from folders import make_run
from held import PATIENCE

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ["norms", "rates"]
SHIM = Path(__file__).parent.parent / "docs" / "site" / "iframe-worker.js"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]

FIGURE = "JSON.parse(document.getElementById('data').textContent).figures.find((figure) => figure.key === key)"
FIRST_MEDIANS = f"(key) => {FIGURE}.panels[0].curves[0].median"
RUNS_OF_ALL_CURVES = f"""((key) => {FIGURE}.panels.flatMap((panel) => panel.curves).map((curve) =>
    JSON.parse(document.getElementById('data').textContent).runs[curve.settings[0]].length).reduce((a, b) => a + b)
)('accuracy')"""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="needs Chromium and playwright"
)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=1000 * PATIENCE)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """The pages of three norms over eight epochs, with a run that diverged; and of the same at three learning rates."""
    folder = tmp_path_factory.mktemp("study")
    for seed in range(3):
        for norm, top in {"balnorm": 0.9, "batchnorm": 0.85, "none": 0.4}.items():
            make_run(folder / "norms", norm, seed, [top * (1 - 0.6 ** (e + 1)) + seed / 100 for e in range(8)])
            for lr in (0.01, 0.1, 1.0):
                make_run(folder / "rates", norm, seed, [0.2, top - lr / 10], lr=lr)
    make_run(folder / "norms", "groupnorm", 0, [0.3, 0.4], epochs=8, diverged=True)
    return {name: write_report([folder / name], folder / name / "report", formats=["svg"]).page for name in PAGES}


@pytest.fixture(params=PAGES)
def page(request, browser, study):
    with browser.new_context(viewport={"width": 1400, "height": 1000}) as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE)
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("requestfailed", lambda request: page.complaints.append(request.url))
        page.requests = []
        page.on("request", lambda request: page.requests.append(request.url))
        page.goto(study[request.param].as_uri())
        yield page
        assert page.complaints == []
        assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []


def test_figures_are_drawn_and_everything_is_in_view(page):
    panels = page.locator(".panel svg")
    assert panels.count() >= 9
    assert page.locator(".line").count() >= 9 * 3
    for line in page.locator(".line").all():
        assert "NaN" not in line.get_attribute("points")
    for width in (1400, 390):
        before = panels.first.element_handle()
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("panel => !panel.isConnected", arg=before)  # it is drawn anew, a moment after
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        box = panels.first.bounding_box()
        assert 200 < box["width"] <= width


def test_curves_can_be_switched_off_and_on(page):
    lines = page.locator('.line[data-norm="batchnorm"]')
    before, others = lines.count(), page.locator(".line").count()
    assert before >= 9
    page.get_by_label("batchnorm", exact=True).uncheck()
    assert lines.count() == 0
    assert page.locator(".line").count() == others - before
    page.get_by_label("batchnorm", exact=True).check()
    assert lines.count() == before


def test_single_seeds_are_thin_lines_in_place_of_bands(page):
    seeds, bands, lines = (page.locator(f"#figure-accuracy .{name}") for name in ("seed", "band", "line"))
    before, medians = bands.count(), lines.count()
    assert before >= 9
    assert seeds.count() == 0
    page.get_by_label("single seeds").check()
    assert (seeds.count(), bands.count(), lines.count()) == (page.evaluate(RUNS_OF_ALL_CURVES), 0, medians)
    assert all("NaN" not in seed.get_attribute("points") for seed in seeds.all())
    page.get_by_label("single seeds").uncheck()
    assert (seeds.count(), bands.count()) == (0, before)


def test_losses_have_a_logarithmic_axis(page):
    def heights():
        """Of the first curve of a figure, with the logarithms of its values."""
        found = {}
        for key in ("accuracy", "loss"):
            points = page.locator(f"#figure-{key} .line").first.get_attribute("points").split()
            values = page.evaluate(FIRST_MEDIANS, key)
            found[key] = np.array([float(point.split(",")[1]) for point in points]), np.log(values)
        return found

    before = heights()
    page.get_by_label("logarithmic axis for losses").check()
    after = heights()
    assert (after["accuracy"][0] == before["accuracy"][0]).all()
    y, logarithms = after["loss"]
    assert y == pytest.approx(np.polyval(np.polyfit(logarithms, y, 1), logarithms), abs=1e-6)
    assert len(set(y)) == len(y)


def test_time_is_an_axis_too(page):
    def first():
        return float(page.locator("#figure-accuracy .line").first.get_attribute("points").split(",")[0])

    left = first()
    page.get_by_label("time instead of epochs").check()
    assert page.locator("#figure-accuracy .panel").first.get_by_text("time, seconds").is_visible()
    assert first() > left + 5  # the axis starts at 0 seconds, that of epochs at 1
    page.get_by_label("time instead of epochs").uncheck()
    assert first() == left


def test_everything_can_be_reached_with_the_keyboard(page):
    tip, focused = page.locator("#tip"), page.locator(":focus")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.get_by_label("single seeds").is_checked()
    for _ in range(3 + len(page.evaluate("data => JSON.parse(document.getElementById('data').textContent).styles"))):
        page.keyboard.press("Tab")
    assert "Arrow keys" in focused.get_attribute("aria-label")
    page.keyboard.press("Home")
    start = tip.inner_text()
    assert "n = 3" in start
    page.keyboard.press("ArrowRight")
    assert tip.inner_text() != start
    page.keyboard.press("ArrowLeft")
    assert tip.inner_text() == start
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("End")
    page.keyboard.press("Tab")  # to the next panel
    assert not tip.is_visible()


def test_hovering_shows_the_values(page):
    tip = page.locator("#tip")
    assert not tip.is_visible()
    panel = page.locator("#figure-accuracy .panel svg").first
    box = panel.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    assert tip.is_visible()
    text = tip.inner_text()
    assert "balnorm" in text
    assert "n = 3" in text
    assert "%" in text
    for edge in (box["x"] + 60, box["x"] + box["width"] - 12):  # it never leaves the window
        page.mouse.move(edge, box["y"] + box["height"] / 2)
        place = tip.bounding_box()
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= 1400
    page.mouse.move(2, 2)
    assert not tip.is_visible()


def test_tables_sort_both_ways(page):
    table = page.locator("#table-results")

    def column(index):
        cells = table.locator(f"tbody tr td:nth-child({index})")
        return [cell.get_attribute("data-sort") for cell in cells.all()]

    heading = table.get_by_role("button", name="test accuracy")
    heading.click()
    upwards = [float(value) for value in column(3)]
    assert upwards == sorted(upwards)
    heading.click()
    downwards = [float(value) for value in column(3)]
    assert downwards == sorted(downwards, reverse=True)
    assert upwards != downwards
    table.get_by_role("button", name="setting").click()
    assert column(1) == sorted(column(1))
    assert table.locator("th[aria-sort]").count() == 1


def test_dark_and_print_have_their_own_colours(page):
    def background():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="light")
    assert background() == "rgb(255, 255, 255)"
    page.emulate_media(color_scheme="dark")
    dark = [int(part) for part in background()[4:-1].split(",")]
    assert max(dark) < 60
    page.emulate_media(color_scheme="dark", media="print")
    assert background() == "rgb(255, 255, 255)"
    assert len(page.pdf()) > 10_000


def test_a_panel_of_diverged_runs_says_so(browser, tmp_path):
    make_run(tmp_path, "none", 0, [0.3, 0.4], lr=0.1)
    make_run(tmp_path, "none", 0, [], epochs=2, diverged=True, lr=3.0)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(write_report([tmp_path], tmp_path / "report", formats=["svg"]).page.as_uri())
        said = page.locator(".panel svg").filter(has_text="diverged")
        assert said.count() == 2  # of test and of training loss
        assert all("lr=3.0" in panel.text_content() for panel in said.all())


def test_figures_in_files_have_dark_colours_too(browser, study):
    colours = """() => [["path", "fill"], ["text", "fill"], ["use", "stroke"]].map(([name, what]) =>
        getComputedStyle(document.querySelector(name))[what])"""
    found = {}
    for scheme in ("light", "dark"):
        with browser.new_context(color_scheme=scheme) as context:
            page = context.new_page()
            page.goto((study["norms"].parent / "accuracy.svg").as_uri())
            found[scheme] = [sum(map(int, re.findall(r"\d+", colour))) / 3 for colour in page.evaluate(colours)]
    (paper, text, axis), (dark_paper, dark_text, dark_axis) = found["light"], found["dark"]
    assert (paper, text, axis) == (255, 0, 0)
    assert dark_paper < 30
    assert dark_text > 220
    assert dark_axis > 150


def test_the_search_of_the_site_needs_no_server(browser, tmp_path):
    """Browsers start no worker from disk. The worker answers from a frame instead, in the order of the questions."""
    answer = 'addEventListener("message", async ({ data }) => postMessage(await data + 1))'
    ask = """for (const number of [1, 2]) worker.postMessage(number);
        worker.addEventListener("message", ({ data }) => document.body.append(data))"""
    (tmp_path / "worker.js").write_text(answer)
    page = (
        f'<body><script src="{SHIM.as_uri()}"></script><script>const worker = new Worker("worker.js"); {ask}</script>'
    )
    (tmp_path / "index.html").write_text(page)
    with browser.new_context() as context:
        page = context.new_page()
        page.goto((tmp_path / "index.html").as_uri())
        page.wait_for_function("document.body.textContent.endsWith('23')", timeout=1000 * PATIENCE)
