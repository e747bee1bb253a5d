"""From folders to numbers, figures and a page: what is said is what the runs say, whatever state they are in."""

import csv
import io
import json
import math
import re
import statistics as stdlib
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import balnorm
from balnorm.bench.cli import main
from balnorm.bench.norms import NORMS
from balnorm.bench.study.figures import STYLES, Curve, Figure, Panel, figures, styles_of
from balnorm.bench.study.plots import figure_files
from balnorm.bench.study.report import summarise, write_report
from balnorm.bench.study.results import read_results
from balnorm.bench.study.statistics import (
    difference,
    differences_to,
    epochs_to_reach,
    final,
    levels,
    probability_of_improvement,
    quantile,
    seconds_by_epoch,
    spread,
    values_by_epoch,
)
from balnorm.bench.study.tables import as_csv, as_latex, as_markdown, as_text, study_tables
from folders import make_run

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=12)


@pytest.fixture
def study(tmp_path):
    """BalNorm ahead of BatchNorm by 1 to 5 points; GroupNorm diverges once of three; one run of none is under way."""
    for seed in range(5):
        make_run(tmp_path, "batchnorm", seed, [0.5, 0.6, 0.70 + seed / 100])
        make_run(tmp_path, "balnorm", seed, [0.5, 0.7, 0.71 + seed / 50])
    for seed in range(3):
        make_run(tmp_path, "groupnorm", seed, [0.4] if seed == 0 else [0.4, 0.5, 0.6], epochs=3, diverged=seed == 0)
        make_run(tmp_path, "none", seed, [0.2, 0.3] if seed == 2 else [0.2, 0.3, 0.4], epochs=3)
    return tmp_path


def tables_of(study, reach):
    results = read_results([study])
    return study_tables(results, reach, differences_to(results, "batchnorm"))


def summary_of(study):
    results = read_results([study])
    return summarise(results, differences_to(results, "batchnorm"))


# --------------------------------------------------------------------------------------------------------------------
# Statistics
# --------------------------------------------------------------------------------------------------------------------


@given(numbers, st.floats(0, 1))
def test_quantiles_are_numpys(values, q):
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-9, abs=1e-6)


def test_quantiles_of_infinite_values_are_no_nan():
    assert quantile([1.0, math.inf, math.inf], 0.5) == math.inf
    assert quantile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert quantile([1.0, 2.0, math.inf, math.inf], 0.5) == math.inf
    assert quantile([math.inf] * 4, 0.3) == math.inf


@given(numbers)
def test_the_spread_is_median_and_quartiles(values):
    found = spread(values)
    assert found.median == pytest.approx(stdlib.median(values), rel=1e-9, abs=1e-6)
    assert found.low <= found.median + 1e-6
    assert found.median <= found.high + 1e-6
    assert found.n == len(values)
    assert spread([]) is None


def test_a_run_that_diverged_counts_as_the_worst(study):
    runs = [run for run in read_results([study]).runs if run.recipe.norm == "groupnorm"]
    assert final(runs, "test_accuracy") == {0: 0.0, 1: 0.6, 2: 0.6}
    assert final(runs, "test_loss")[0] == math.inf
    spreads = values_by_epoch(runs, "test_accuracy").values()
    assert [each.low for each in spreads] == [0.4, 0.25, 0.3]  # from the second epoch on one of three is 0
    assert [each.n for each in spreads] == [3, 3, 3]
    assert sorted(epochs_to_reach(runs, 0.5)) == [2, 2, math.inf]


def test_a_run_under_way_counts_as_far_as_it_is(study):
    runs = [run for run in read_results([study]).runs if run.recipe.norm == "none"]
    assert [each.n for each in values_by_epoch(runs, "test_accuracy").values()] == [3, 3, 2]
    assert final(runs, "test_accuracy") == {0: 0.4, 1: 0.4}
    assert len(epochs_to_reach(runs, 0.1)) == 2


def test_the_time_of_an_epoch_is_a_sum_of_medians(tmp_path):
    for seed, seconds in enumerate(([1.0, 2.0, 9.0], [3.0, 2.0, 1.0], [8.0])):
        run = make_run(tmp_path, "none", seed, [0.1] * len(seconds), epochs=3)
        records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        run.metrics.write_text(
            "".join(json.dumps({**r, "seconds": s}) + "\n" for r, s in zip(records, seconds, strict=True))
        )
    assert seconds_by_epoch(read_results([tmp_path]).runs) == [3.0, 5.0, 10.0]


def test_differences_are_paired_by_seed():
    theirs = {seed: 0.5 + seed / 10 for seed in range(5)}  # far apart from seed to seed, and always one point behind
    found = difference({seed: value + 0.01 for seed, value in theirs.items()}, theirs)
    assert (found.median, found.low, found.high) == pytest.approx((0.01, 0.01, 0.01))
    assert found.n == 5
    assert found.improvement == pytest.approx(15 / 25)  # over all pairs the seeds hide it
    assert difference({1: 0.5}, {2: 0.5}) is None
    assert difference({1: 0.5, 2: 0.9}, {2: 0.5}).n == 1


def test_the_interval_of_few_seeds_is_infinite_and_of_many_holds_the_median():
    assert difference(dict.fromkeys(range(4), 0.6), dict.fromkeys(range(4), 0.5)).low == -math.inf
    rng = np.random.default_rng(1)
    ours, theirs = (dict(enumerate(rng.normal(size=30))) for _ in range(2))
    found = difference(ours, theirs)
    assert found.low < found.median < found.high
    assert found == difference(ours, theirs)  # the same every time
    each = np.sort([ours[s] - theirs[s] for s in ours])
    assert each[5] < found.low < each[14]  # about the 9th and the 21st of 30, by the binomial distribution
    assert each[15] < found.high < each[25]


@given(numbers, numbers)
def test_probability_of_improvement_is_fair(ours, theirs):
    there, back = probability_of_improvement(ours, theirs), probability_of_improvement(theirs, ours)
    assert there + back == pytest.approx(1.0)
    assert 0 <= there <= 1
    assert probability_of_improvement([max(theirs) + 1], theirs) == 1


def test_levels_are_whole_percents_below_the_best(study):
    results = read_results([study])
    assert levels(results) == [0.56, 0.67, 0.72]  # of 0.75


# --------------------------------------------------------------------------------------------------------------------
# Tables
# --------------------------------------------------------------------------------------------------------------------


def rows_of(table):
    return {row[0].text: dict(zip(table.header, (cell.text for cell in row), strict=True)) for row in table.rows}


def test_the_tables_say_what_the_runs_say(study):
    results, differences, cost = tables_of(study, [0.55, 0.7])
    rows = rows_of(results)
    assert list(rows) == ["balnorm", "batchnorm", "groupnorm", "none"]
    assert rows["balnorm"]["test accuracy, %"] == "75.00 (73.00–77.00)"  # noqa: RUF001
    assert rows["balnorm"]["n"] == "5"
    assert rows["groupnorm"]["test accuracy, %"] == "60.00 (30.00–60.00)"  # noqa: RUF001
    assert rows["groupnorm"]["test loss"] == "0.800 (0.800–∞)"  # noqa: RUF001
    assert (rows["groupnorm"]["diverged"], rows["none"]["unfinished"], rows["none"]["n"]) == ("1", "1", "2")
    rows = rows_of(differences)
    assert list(rows) == ["balnorm", "groupnorm", "none"]
    assert rows["balnorm"]["difference, points"] == "+3.00"
    assert rows["balnorm"]["95% interval"] == "+1.00 to +5.00"
    assert rows["none"]["95% interval"] == "too few seeds"
    rows = rows_of(cost)
    assert rows["balnorm"]["epochs to 55%"] == "2 (2–2)"  # noqa: RUF001
    assert rows["none"]["epochs to 55%"] == "not reached"
    assert rows["balnorm"]["seconds an epoch"] == "1.50 (1.50–1.50)"  # noqa: RUF001
    assert rows["balnorm"]["peak memory, MiB"] == "300 (300–300)"  # noqa: RUF001


def test_the_csv_has_the_numbers_themselves(study):
    results, differences, _ = tables_of(study, [0.55])
    rows = {row["setting"]: row for row in csv.DictReader(io.StringIO(as_csv(results)))}
    assert float(rows["balnorm"]["test_accuracy"]) == pytest.approx(0.75)
    assert float(rows["groupnorm"]["test_loss_high"]) == math.inf
    rows = {row["setting"]: row for row in csv.DictReader(io.StringIO(as_csv(differences)))}
    assert float(rows["balnorm"]["difference_low"]) == pytest.approx(0.01)
    assert rows["none"]["difference_low"] == ""


def test_markdown_and_latex_are_well_formed(study):
    for table in tables_of(study, [0.55]):
        lines = as_markdown(table).splitlines()
        body = [line for line in lines if line.startswith("|")]
        assert len({line.count("|") for line in body}) == 1
        assert len(body) == 2 + len(table.rows)
        latex = as_latex(table)
        columns = re.search(r"begin\{tabular\}\{(\w+)\}", latex)[1]
        content = [line for line in latex.splitlines() if line.endswith(r"\\")]
        assert {line.count(" & ") for line in content} == {len(columns) - 1}
        assert all(rule in latex for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
        assert not re.search(r"(?<!\\)[%_]", latex.split("\n", 1)[1])
        assert as_text(table).count("\n") == len(table.rows) + 1


# --------------------------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------------------------


def test_every_norm_has_a_style_of_its_own():
    assert NORMS.keys() < STYLES.keys()
    assert len(set(STYLES.values())) == len(STYLES)


def test_options_of_a_norm_are_lines_of_one_panel_and_numbers_an_axis(tmp_path):
    """As the norms with names such as balnorm-position were, and with a figure of their own."""
    for mass in ("channel", "position"):
        for fraction in (0.1, 0.25, 1.0):
            make_run(tmp_path, accuracies=[0.5, 0.6 + fraction / 10], mass=mass, stats_fraction=fraction)
    make_run(tmp_path, "groupnorm")
    sweep, *by_epoch = figures(read_results([tmp_path]))
    assert sweep.key == "by-stats-fraction"
    assert [(curve.norm, curve.x) for curve in sweep.panels[0].curves] == [
        ("balnorm", (0.1, 0.25, 1.0)),
        ("balnorm mass=position", (0.1, 0.25, 1.0)),
    ]
    (panel,) = by_epoch[0].panels
    assert [curve.norm for curve in panel.curves][:2] == ["balnorm", "balnorm mass=position"]
    assert len(panel.curves) == len({sweep.styles[curve.norm] for curve in panel.curves}) == 7
    report = write_report([tmp_path], tmp_path / "report", formats=[], baseline="balnorm mass=position")
    assert rows_of(report.tables[1])["balnorm mass=position stats_fraction=0.1"]["difference, points"] == "-9.00"


def test_a_study_of_norms_has_all_epochs_and_two_zooms(tmp_path):
    for seed in range(3):
        for norm, top in {"balnorm": 0.9, "batchnorm": 0.88, "none": 0.3}.items():
            make_run(tmp_path, norm, seed, [top * (1 - 0.5 ** (e + 1)) for e in range(12)])
    drawn = {figure.key: figure for figure in figures(read_results([tmp_path]))}
    assert set(drawn) == {"accuracy", "loss", "training-loss"}
    whole, early, late = drawn["accuracy"].panels
    assert [curve.norm for curve in whole.curves] == ["balnorm", "batchnorm", "none"]
    assert (early.x_range, late.x_range) == ((1, 4), (9, 12))
    assert late.y_range[0] > 0.8  # none, far below, does not squeeze the others together
    assert whole.y_range[0] < 0.2
    assert whole.curves[0].median[-1] == pytest.approx(0.9, rel=1e-3)


@pytest.mark.parametrize(
    ("epochs", "ranges"), [(7, [None]), (8, [None, (1, 4), (5, 8)]), (30, [None, (1, 8), (23, 30)])]
)
def test_runs_of_fewer_than_eight_epochs_are_shown_as_a_whole(tmp_path, epochs, ranges):
    make_run(tmp_path, accuracies=[(e + 1) / epochs for e in range(epochs)])
    accuracy = figures(read_results([tmp_path]))[0]
    assert [panel.x_range for panel in accuracy.panels] == ranges


def test_an_axis_holds_all_values_with_a_margin_but_no_spike_of_the_loss(tmp_path):
    make_run(tmp_path, accuracies=[0.5, 0.6, 0.9], losses=[2.0, 50.0, 0.5])
    accuracy, loss, _ = figures(read_results([tmp_path]))
    assert accuracy.panels[0].y_range == pytest.approx((0.48, 0.92))
    assert loss.panels[0].y_range == pytest.approx((0.5 - 0.105, 1.3 * 2.0 + 0.105))


def test_a_run_that_is_ahead_but_not_at_its_end_does_not_decide_what_is_seen_there(tmp_path):
    make_run(tmp_path, "balnorm", 0, [0.5] * 12)
    make_run(tmp_path, "batchnorm", 0, [0.9] * 3, epochs=12)
    late = figures(read_results([tmp_path]))[0].panels[2]
    assert late.y_range == pytest.approx((0.49, 0.51))


def test_a_sweep_takes_three_numbers_and_is_logarithmic_from_a_factor_of_ten_on(tmp_path):
    logarithmic = {}
    for rates in ((0.1, 1.0), (0.1, 0.3, 0.9), (0.1, 0.3, 1.0)):
        for lr in rates:
            make_run(tmp_path / f"{rates}", lr=lr)
        drawn = [figure for figure in figures(read_results([tmp_path / f"{rates}"])) if figure.key == "by-lr"]
        logarithmic[rates] = [panel.x_log for figure in drawn for panel in figure.panels]
    assert logarithmic == {(0.1, 1.0): [], (0.1, 0.3, 0.9): [False], (0.1, 0.3, 1.0): [True]}


@pytest.fixture
def canvases(monkeypatch):
    """What matplotlib was asked to save."""
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda canvas, *_, **__: drawn.append(canvas))
    return drawn


def figure_of(*panels, **options):
    styles = styles_of([curve.norm for panel in panels for curve in panel.curves])
    given = {"key": "accuracy", "title": "", "y_label": "", "percent": True, "panels": panels, "styles": styles}
    return Figure(**{**given, **options})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_a_figure_has_axes_for_its_panels_and_no_more(canvases, count):
    """Empty ones stayed in the last row."""
    panel = Panel("", "epoch", (Curve("none", (1.0, 2.0), (0.5, 0.6), (0.4, 0.5), (0.6, 0.7), (3, 3)),))
    figure_files(figure_of(*[panel] * count), ["svg"])
    assert len(canvases[0].axes) == count
    assert all(axes.lines for axes in canvases[0].axes)


def test_a_panel_is_drawn_as_it_says(canvases):
    several = Curve("balnorm", (0.1, 0.3, 1.0), (0.5, None, 0.7), (0.4, 0.4, 0.6), (0.6, 0.7, 0.8), (3, 3, 3))
    one = Curve("none", (0.3,), (0.5,), (0.4,), (0.6,), (1,))
    panel = Panel("", "lr", (several, one), (0.05, 2.0), (0.35, 0.85), x_log=True)
    for key in ("accuracy", "by-lr"):
        figure_files(figure_of(panel, key=key), ["svg"])
    (by_epoch,), (sweep,) = (canvas.axes for canvas in canvases)
    assert (by_epoch.get_xlim(), by_epoch.get_ylim()) == ((0.05, 2.0), (0.35, 0.85))
    assert by_epoch.get_xscale() == "log"
    assert by_epoch.yaxis.get_major_formatter()(0.625, 0) == "62.5%"
    assert [line.get_marker() for line in by_epoch.lines] == ["", "o"]  # a single point has no line
    assert [line.get_marker() for line in sweep.lines] == ["o", "o"]
    assert [math.isnan(y) for y in by_epoch.lines[0].get_ydata()] == [False, True, False]


def test_a_panel_of_diverged_runs_says_so_and_keeps_its_epochs(canvases):
    """It was empty, on an axis from -0.05 to 0.05."""
    nothing = (None,) * 10
    curve = Curve("none", tuple(range(1, 11)), nothing, nothing, nothing, (3,) * 10)
    figure_files(figure_of(Panel("", "epoch", (curve,), y_range=(0, 2))), ["svg"])
    (axes,) = canvases[0].axes
    assert [text.get_text() for text in axes.texts] == ["diverged"]
    assert axes.get_xlim()[0] == pytest.approx(0.55)
    assert axes.get_xlim()[1] == pytest.approx(10.45)
    assert axes.get_ylim() == (0, 2)


def test_a_legend_stays_inside_its_figure(tmp_path, canvases):
    """Of one panel, and with the longest names."""
    for norm in ["balnorm", "batchnorm", *sorted(NORMS, key=len)[-3:]]:
        for lr in (0.1, 0.2, 0.3):
            make_run(tmp_path, norm, 0, lr=lr)
    figure_files(next(figure for figure in figures(read_results([tmp_path])) if figure.key == "by-lr"), ["png"])
    (canvas,) = canvases
    canvas.draw_without_rendering()
    box = canvas.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= canvas.bbox.width


def test_bands_are_quartiles(tmp_path):
    for seed in range(5):
        make_run(tmp_path, "none", seed, [0.1 * seed + 0.1] * 2)
    curve = figures(read_results([tmp_path]))[0].panels[0].curves[0]
    assert (curve.low[-1], curve.median[-1], curve.high[-1]) == pytest.approx((0.2, 0.3, 0.4))
    assert curve.n == (5, 5)


def test_what_varies_has_a_panel_each_and_a_sweep(tmp_path):
    for seed in range(2):
        for lr in (0.01, 0.1, 1.0):
            for norm in ("balnorm", "batchnorm"):
                make_run(tmp_path, norm, seed, [0.3, 0.5 + lr / 10], lr=lr)
    sweep, accuracy, *_ = figures(read_results([tmp_path]))
    assert sweep.key == "by-lr"
    assert sweep.panels[0].x_log
    assert sweep.panels[0].curves[0].x == (0.01, 0.1, 1.0)
    assert sweep.panels[0].curves[0].median == pytest.approx((0.501, 0.51, 0.6))
    assert [panel.title for panel in accuracy.panels] == ["lr=0.01", "lr=0.1", "lr=1.0"]
    assert len({panel.y_range for panel in accuracy.panels}) == 1  # comparable


def test_a_field_that_follows_from_another_is_not_shown_twice(tmp_path):
    for size in (8, 32, 128):
        make_run(tmp_path, "balnorm", 0, [0.3, 0.5], batch_size=size, lr=size / 1000)
    assert [str(s) for s in read_results([tmp_path]).by_setting] == [
        "balnorm batch_size=8",
        "balnorm batch_size=32",
        "balnorm batch_size=128",
    ]


# --------------------------------------------------------------------------------------------------------------------
# The report
# --------------------------------------------------------------------------------------------------------------------


def test_a_report_has_all_its_files(study):
    report = write_report([study], study / "report")
    names = {path.name for path in (study / "report").iterdir()}
    figures = {f"{key}.{kind}" for key in ("accuracy", "loss", "training-loss") for kind in ("svg", "png", "pdf")}
    tables = {f"{key}.{kind}" for key in ("results", "differences", "cost") for kind in ("csv", "md", "tex")}
    assert names == {"index.html"} | figures | tables
    assert ET.parse(study / "report" / "accuracy.svg").getroot().tag.endswith("svg")
    assert (study / "report" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert (study / "report" / "accuracy.pdf").read_bytes().startswith(b"%PDF")
    page = report.page.read_text()
    assert "../runs/balnorm-seed0/metrics.jsonl" in page
    assert "balnorm compare digits" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)  # no network
    assert not report.problems


def test_the_same_study_gives_the_same_bytes(study):
    for name in ("a", "b"):
        write_report([study / "runs"], study.parent / f"{study.name}-{name}" / "report")
    first, second = (study.parent / f"{study.name}-{name}" / "report" for name in "ab")
    for path in first.iterdir():
        if path.name != "index.html":  # which links the runs from where it is
            assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_the_summary_in_words(study):
    text = " ".join(summary_of(study))
    assert "balnorm came out highest: a median test accuracy of 75.00% after 3 epochs" in text
    verdict = (
        "balnorm is +3.00 points from batchnorm (median of 5 seeds, 95% interval +1.00 to +5.00, which excludes 0)"
    )
    assert verdict in text
    assert "Of 16 runs, 14 finished, 1 diverged, 1 not finished yet." in text
    assert "fewer than five seeds" in text  # groupnorm has three


def test_a_tie_has_no_winner(tmp_path):
    for seed in range(5):
        for norm in ("balnorm", "batchnorm", "none"):
            make_run(tmp_path, norm, seed, [0.5, 0.6 if norm == "none" else 0.8])
    text = " ".join(summary_of(tmp_path))
    assert (
        "balnorm and batchnorm came out highest, alike: a median test accuracy of 80.00% after 2 epochs (5 seeds)."
        in text
    )
    assert "Then none 60.00%." in text


def test_a_study_of_one_run_is_told_as_one(tmp_path):
    """It "came out highest", of 1 runs, with quartiles of one number."""
    make_run(tmp_path, "balnorm", 0, [0.5, 0.75])
    report = write_report([tmp_path], tmp_path / "report", formats=["svg"])
    assert report.summary == ("balnorm reached a test accuracy of 75.00% after 2 epochs (1 seed).", "The run finished.")
    assert rows_of(report.tables[0])["balnorm"]["test accuracy, %"] == "75.00"
    assert "<summary>1 run, with" in report.page.read_text()
    make_run(tmp_path / "other", "none", 0, [0.1], epochs=3)
    assert summary_of(tmp_path / "other") == ["The run has not finished yet."]
    make_run(tmp_path / "third", "none", 0, [0.1], epochs=3, diverged=True)
    assert summary_of(tmp_path / "third") == ["The run diverged."]


def test_an_unfinished_copy_does_not_hide_a_finished_run(tmp_path):
    make_run(tmp_path, "balnorm", 0, [0.5], epochs=2, name="a-copy")
    make_run(tmp_path, "balnorm", 0, [0.5, 0.7], name="the-run")
    results = read_results([tmp_path])
    assert [(run.folder.name, run.state) for run in results.runs] == [("the-run", "finished")]
    (problem,) = results.problems
    assert problem.endswith("the-run: left out")
    assert "a-copy is the same run as" in problem


def test_the_summary_with_balnorm_as_the_baseline(tmp_path):
    """It said that there was nothing to compare, above a table of differences."""
    for seed in range(5):
        make_run(tmp_path, "balnorm", seed, [0.5, 0.6])
        make_run(tmp_path, "balnorm", seed, [0.5, 0.7], mass="position")
        make_run(tmp_path, "none", seed, [0.5, 0.4])
    results = read_results([tmp_path])
    sentences = summarise(results, differences_to(results, "balnorm"))
    assert [text.split(" points")[0] for text in sentences if "eed by seed" in text] == [
        "Seed by seed, balnorm mass=position is +10.00",
        "Seed by seed, none is -20.00",
    ]


def test_an_accuracy_of_zero_is_not_called_divergence(tmp_path):
    make_run(tmp_path, "balnorm", 0, [0.0])
    make_run(tmp_path, "none", 0, [0.0])
    assert "iverged" not in " ".join(summary_of(tmp_path))
    make_run(tmp_path, "batchnorm", 0, [0.1])
    assert "Then balnorm 0.00%, none 0.00%." in summary_of(tmp_path)


def test_costs_of_several_machines_are_marked(tmp_path):
    def note():
        results = read_results([tmp_path])
        return study_tables(results, [], differences_to(results, "batchnorm"))[-1].note

    for seed, processor in enumerate(("Xeon", "Xeon", "EPYC")):
        run = make_run(tmp_path, "balnorm", seed)
        (start,) = json.loads(run.environment.read_text())
        run.environment.write_text(json.dumps([{**start, "processor": processor, "started": str(seed)}]))
        assert ("several machines" in note()) == (processor == "EPYC")


def test_the_summary_of_many_pairs_is_one_sentence(tmp_path):
    for lr, gain in {0.01: 0.1, 0.1: 0.0, 1.0: -0.1, 2.0: 0.2}.items():
        for seed in range(5):
            make_run(tmp_path, "batchnorm", seed, [0.2, 0.5 + seed / 100], lr=lr)
            make_run(tmp_path, "balnorm", seed, [0.2, 0.5 + seed / 100 + gain], lr=lr)
    (sentence,) = [text for text in summary_of(tmp_path) if "Seed by seed" in text]
    assert "ahead of batchnorm in 2 of 4 such pairs of settings and behind in 1" in sentence


def test_damaged_and_foreign_folders_are_told_and_not_fatal(study):
    runs = study / "runs"
    with (runs / "balnorm-seed0" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "tes')
    (runs / "balnorm-seed1" / "environment.json").unlink()
    (runs / "balnorm-seed2" / "metrics.jsonl").unlink()
    (runs / "batchnorm-seed0" / "holiday.jpg").write_bytes(b"\xff\xd8")
    (runs / "batchnorm-seed1" / "config.json").write_text('{"name": "di')
    (runs / "batchnorm-seed2" / "metrics.jsonl").write_text("no\njson\n")
    (runs / "none-seed0" / "config.json").write_text('{"data": "digits", "evil": 1}')
    (runs / "none-seed1" / "config.json").unlink()
    line = json.loads((runs / "none-seed2" / "metrics.jsonl").read_text().splitlines()[0])
    (runs / "none-seed2" / "metrics.jsonl").write_text(json.dumps({**line, "test_accuracy": "high"}) + "\n")
    (runs / "groupnorm-seed1" / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n")
    (runs / "groupnorm-seed2" / "config.json").write_text("[]")
    (runs / "photos").mkdir()
    report = write_report([study], study / "report")
    told = "\n".join(report.problems)
    for word in (
        "balnorm-seed0/metrics.jsonl ends in the middle of a line",
        "balnorm-seed1/environment.json is missing",
        "balnorm-seed2 has no metrics yet",
        "holiday.jpg",
        "batchnorm-seed1/config.json cannot be read",
        "batchnorm-seed2/metrics.jsonl, line 1 is not JSON",
        "none-seed0/config.json cannot be read",
        "none-seed1 has metrics and no config.json",
        "none-seed2/metrics.jsonl, line 1 has no finite number for test_accuracy",
        "groupnorm-seed1/metrics.jsonl, line 1",
        "groupnorm-seed2/config.json",
    ):
        assert word in told
    assert len(report.problems) == 11
    assert rows_of(report.tables[0])["balnorm"]["n"] == "4"
    assert all(problem.replace("&", "&amp;").split("(")[0] in report.page.read_text() for problem in report.problems)


WRONG = {"name": ["a"], "norm": "foo", "epochs": 2.0, "drops": 3, "compile": 1, "lr": math.nan, "seed": -1, "depth": 9}


@pytest.mark.parametrize("change", [{name: value} for name, value in WRONG.items()])
def test_a_recipe_of_wrong_values_is_left_out(tmp_path, change):
    make_run(tmp_path, "batchnorm")
    run = make_run(tmp_path, "balnorm")
    run.config.write_text(json.dumps({**json.loads(run.config.read_text()), **change}))
    report = write_report([tmp_path], tmp_path / "report", formats=["svg"])
    assert len(report.problems) == 1
    assert "balnorm-seed0/config.json cannot be read" in report.problems[0]
    assert "The run finished." in report.summary


@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", "Infinity", "true", "null", '"1"'])
def test_a_metric_that_is_no_number_is_a_failed_run(tmp_path, value):
    make_run(tmp_path, "batchnorm")
    run = make_run(tmp_path, "balnorm")
    run.metrics.write_text(run.metrics.read_text().replace('"test_loss": 1.0', f'"test_loss": {value}'))
    report = write_report([tmp_path], tmp_path / "report", formats=["svg"])
    assert "line 1 has no finite number for test_loss: counted as failed" in report.problems[0]
    assert "Of 2 runs, 1 finished, 1 failed." in report.summary


def test_metrics_that_nobody_may_read_are_a_failed_run(tmp_path, monkeypatch):
    """They ended the whole report, as one that could not be written."""
    make_run(tmp_path, "batchnorm")
    forbidden, read = make_run(tmp_path, "balnorm").metrics, Path.open

    def opened(path, *arguments, **keywords):
        if path == forbidden:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *arguments, **keywords)

    monkeypatch.setattr(Path, "open", opened)
    report = write_report([tmp_path], tmp_path / "report", formats=["svg"])
    assert "Permission denied" in report.problems[0]
    assert "Of 2 runs, 1 finished, 1 failed." in report.summary


def test_metrics_that_cannot_be_read_are_a_failed_run(tmp_path):
    make_run(tmp_path, "batchnorm")
    run = make_run(tmp_path, "balnorm")
    run.metrics.unlink()
    run.metrics.mkdir()
    report = write_report([tmp_path], tmp_path / "report", formats=["svg"])
    assert "Of 2 runs, 1 finished, 1 failed." in report.summary


def test_files_of_somebody_else_are_named_and_halves_of_ours_are_not(tmp_path):
    run = make_run(tmp_path, "balnorm")
    (run.folder / "checkpoint.pt.17.tmp").write_text("the first half")
    assert not read_results([tmp_path]).problems
    (run.folder / "notes.txt").write_text("mine")
    (problem,) = read_results([tmp_path]).problems
    assert problem == f"{run.folder} contains files that do not belong to a run (notes.txt): ignored"


def test_the_same_run_counts_once(tmp_path):
    """By two paths, by a link, or as a copy in another folder."""
    for seed in range(2):
        make_run(tmp_path / "a", "balnorm", seed)
        make_run(tmp_path / "b", "balnorm", seed, [0.6, 0.9])
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    report = write_report([tmp_path, tmp_path / "a", tmp_path / "a" / "runs"], tmp_path / "report", formats=["svg"])
    assert len(report.problems) == 2
    assert "b/runs/balnorm-seed0 is the same run as" in report.problems[0]
    assert "All 2 runs finished." in report.summary
    assert rows_of(report.tables[0])["balnorm"]["test accuracy, %"].startswith("80.00")


def test_runs_that_are_linked_to_are_found(tmp_path):
    run = make_run(tmp_path / "elsewhere", "balnorm")
    (tmp_path / "study" / "runs").mkdir(parents=True)
    (tmp_path / "study" / "runs" / "balnorm-seed0").symlink_to(run.folder)
    (tmp_path / "study" / "runs" / "round").symlink_to(tmp_path / "study")  # which leads back
    assert len(read_results([tmp_path / "study"]).runs) == 1


def test_a_study_of_which_little_is_there_is_reported(tmp_path):
    """Some diverged at once and one has just begun: this ended the report once."""
    for seed in range(3):
        make_run(tmp_path, "groupnorm", seed, [0.1], epochs=12, diverged=True)
    make_run(tmp_path, "balnorm", 0, [0.3, 0.4], epochs=12)
    assert "3 diverged, 1 not finished yet" in " ".join(write_report([tmp_path], tmp_path / "report").summary)
    for seed in range(2):
        make_run(tmp_path / "all", "none", seed, [], epochs=3, diverged=True)
    report = write_report([tmp_path / "all"], tmp_path / "report")
    assert "Every setting diverged in half of its runs or more." in report.summary
    assert rows_of(report.tables[0])["none"]["test accuracy, %"] == "diverged"


def test_curves_stay_in_view_where_runs_diverged(tmp_path):
    for seed in range(5):
        losses = [2.2 * 0.8**e for e in range(12)]
        count = 2 if seed < 2 else 12
        make_run(tmp_path, "none", seed, [0.5] * count, losses[:count], epochs=12, diverged=seed < 2)
    (loss,) = [figure for figure in figures(read_results([tmp_path])) if figure.key == "loss"]
    whole, _, late = loss.panels
    assert whole.y_range[0] <= 2.2 * 0.8**11
    assert late.y_range[0] <= 2.2 * 0.8**11


def test_a_setting_that_diverges_does_not_flatten_the_panels_of_the_others(tmp_path):
    for lr, start in ((0.1, 2.0), (0.3, 2.2), (3.0, 400.0)):
        make_run(tmp_path, accuracies=[0.3, 0.5], losses=[start, start / 2], lr=lr)
    (loss,) = [figure for figure in figures(read_results([tmp_path])) if figure.key == "loss"]
    assert all(panel.y_range == pytest.approx((1.0 - 0.093, 1.3 * 2.2 + 0.093)) for panel in loss.panels)


def test_hostile_text_in_a_folder_stays_text(tmp_path):
    evil = "</script><script>alert(1)</script>"
    run = make_run(tmp_path, "balnorm", 0, [0.5, 0.6])
    recipe = json.loads(run.config.read_text())
    run.config.write_text(json.dumps({**recipe, "name": evil}))
    run.environment.write_text(json.dumps([{"torch": evil, "command": ["balnorm", evil]}]))
    page = write_report([tmp_path], tmp_path / "report").page.read_text()
    assert "<script>alert" not in page


def test_mistakes_are_answered_in_a_sentence(study, tmp_path_factory, capsys):
    empty = tmp_path_factory.mktemp("empty")
    for arguments, answer in {
        ("report", str(empty)): "there is no run in",
        ("report", str(empty / "nowhere")): "is not a folder",
        ("report",): "which folder?",
        ("report", str(study), "--reach", "95"): "accuracies between 0 and 1",
    }.items():
        assert main(list(arguments)) == 2
        assert answer in capsys.readouterr().err
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match="reach takes accuracies between 0 and 1"):
            write_report([study], empty / "report", reach=[level])
    with pytest.raises(ValueError, match=r"formats must be of .*svg.*, got gif"):
        write_report([study], empty / "report", formats=["svg", "gif"])
    blocked = empty / "file"
    blocked.write_text("")
    assert main(["report", str(study), "--out", str(blocked)]) == 1
    assert "could not be written" in capsys.readouterr().err


def test_the_command_prints_tables_and_the_page(study, capsys):
    assert main(["report", str(study), "--formats", "svg", "--reach", "0.6", "--title", "Mine"]) == 0
    printed = capsys.readouterr()
    assert "75.00 (73.00–77.00)" in printed.out  # noqa: RUF001
    assert "epochs to 60%" in printed.out
    assert printed.out.strip().endswith("report/index.html")
    assert "<title>Mine</title>" in (study / "report" / "index.html").read_text()
    assert not (study / "report" / "accuracy.png").exists()


def test_twice_the_runs_are_no_more_than_twice_the_work(tmp_path):
    """Counted in lines of our own that are run, of which every machine runs the same."""
    source = str(Path(balnorm.__file__).parent)

    def lines(seeds):
        for norm in ("balnorm", "batchnorm"):
            for seed in range(seeds):
                make_run(tmp_path / f"{seeds}", norm, seed)
        count = 0

        def look(frame, event, _):
            nonlocal count
            if not frame.f_code.co_filename.startswith(source):
                return None
            count += event == "line"
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            report = write_report([tmp_path / f"{seeds}"], tmp_path / "report", formats=["svg"])
        finally:
            sys.settrace(before)
        assert f"All {2 * seeds} runs finished." in report.summary
        assert STYLES["balnorm"].colour in report.page.read_text()
        return count

    lines(2)  # what is done once only
    few, some, many = lines(5), lines(10), lines(20)
    assert few < some < many
    assert (many - some) / (some - few) < 2.2  # 4 if every run were compared with every other
