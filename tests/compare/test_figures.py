import math

import pytest

from tfidf_tune.compare._figures import Course, lms_progress, trade_off
from tfidf_tune.results.figures import lms_distribution

CURVES = {"CE": [(10, 1.0, 0.5), (100, 8.0, 1.0)], "TF-IDF": [(10, 1.0, 0.5), (100, 3.0, 1.0)]}
FLOOR = "held out (chance)"


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines() if len(line.get_xdata())}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_progress_draws_a_panel_for_each_model_and_the_floor_of_each_objective():
    figure = lms_progress({"A": CURVES, "B": {"TF-IDF": CURVES["TF-IDF"]}})
    first, second = figure.axes
    drawn = lines(first)
    assert (list(drawn["TF-IDF"].get_xdata()), list(drawn["TF-IDF"].get_ydata())) == (
        [10, 100],
        [1.0, 3.0],
    )
    floors = [line for line in first.get_lines() if list(line.get_ydata()) == [0.5, 1.0]]
    assert [line.get_color() for line in floors] == [drawn[name].get_color() for name in CURVES]
    assert first.get_ylim()[0] == 0
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["A", "B"]
    assert lines(second)["TF-IDF"].get_color() == drawn["TF-IDF"].get_color()
    assert legend(figure) == ["CE", "TF-IDF", FLOOR]


def course(*points, perplexity=(math.nan, math.nan), lms=(math.nan, math.nan), controls=math.nan):
    return Course(list(points), perplexity, lms, controls)


def require_labels_that_cover_nothing(axes, names, points):
    """Each label is inside, close to its own point, and covers neither another label
    nor a point.
    """
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert list(boxes) == names
    places = axes.transData.transform(points)
    for index, box in enumerate(boxes.values()):
        assert axes.bbox.count_contains(box.corners()) == 4
        assert box.count_overlaps(list(boxes.values())) == 1
        assert box.count_contains(places) == 0
        assert index >= len(points) or box.padded(12).count_contains(places[[index]]) == 1


def test_the_trade_off_has_a_named_point_with_its_intervals_its_path_and_the_floor():
    courses = {
        "CE": course(
            (30.0, 1.0), (20.0, 8.0), perplexity=(19.0, 21.5), lms=(6.0, 11.0), controls=2.0
        ),
        "TF-IDF": course((30.5, 3.0), controls=1.5),
        "Repetition": course((30.0, 2.9)),
    }
    figure = trade_off({"Tiny": courses})
    (axes,) = figure.axes
    drawn = [line.get_xydata().tolist() for line in axes.get_lines()]
    for points in ([[30.0, 1.0], [20.0, 8.0]], [[20.0, 8.0]], [[30.5, 3.0]], [[30.0, 2.9]]):
        assert points in drawn
    assert [[0.0, 1.75], [1.0, 1.75]] in drawn  # the floor, through all of the panel
    (band,) = axes.patches
    assert (band.get_y(), band.get_height()) == (1.5, 0.5)
    across, upright = (one.get_segments()[0] for one in axes.collections)
    assert across[:, 0].tolist() == pytest.approx([19.0, 21.5])
    assert upright[:, 1].tolist() == pytest.approx([6.0, 11.0])
    assert axes.get_ylim()[1] > 11
    assert figure.legends == []
    require_labels_that_cover_nothing(
        axes, [*courses, FLOOR], [one.points[-1] for one in courses.values()]
    )


def test_the_distribution_has_the_share_of_at_least_so_many_tokens():
    figure = lms_distribution({"CE": {"target": [0, 1, 3, 3], "control": [0, 0]}})
    (axes,) = figure.axes
    drawn = {line.get_linestyle(): line.get_xydata().tolist() for line in lines(axes).values()}
    assert drawn["-"] == [[1, 75], [2, 50], [3, 50], [4, 0]]
    assert drawn["--"] == [[1, 0], [2, 0], [3, 0], [4, 0]]
