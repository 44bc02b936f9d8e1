import math

import matplotlib.colors

from tfidf_tune.report._figures import lms_distribution, lms_progress, perplexity_paths

CURVES = {"CE": [(10, 1.0, 0.5), (100, 8.0, 1.0)], "TF-IDF": [(10, 1.0, 0.5), (100, 3.0, 1.0)]}
FLOOR = "never injected (the floor)"


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines() if len(line.get_xdata())}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_progress_draws_a_panel_for_each_model_and_the_floor_of_each_objective():
    figure = lms_progress({"A": CURVES, "B": {"TF-IDF": CURVES["TF-IDF"]}})
    first, second = figure.axes
    drawn = lines(first)
    assert (list(drawn["TF-IDF"].get_xdata()), list(drawn["TF-IDF"].get_ydata())) == ([10, 100], [1.0, 3.0])
    floors = [line for line in first.get_lines() if list(line.get_ydata()) == [0.5, 1.0]]
    assert [line.get_color() for line in floors] == [drawn[name].get_color() for name in CURVES]
    assert first.get_ylim()[0] == 0
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["A", "B"]
    assert lines(second)["TF-IDF"].get_color() == drawn["TF-IDF"].get_color()
    assert legend(figure) == ["CE", "TF-IDF", FLOOR]


def test_without_controls_no_floor_is_drawn_or_promised():
    figure = lms_progress({"Tiny": {"CE": [(10, 1.0, math.nan), (100, 8.0, math.nan)]}})
    assert len(figure.axes[0].get_lines()) == 1
    assert legend(figure) == ["CE"]
    assert legend(lms_distribution({"m": {"target": [1, 2], "control": []}})) == ["m"]


def test_the_frontier_goes_along_the_checkpoints():
    (axes,) = perplexity_paths({"": {"CE": [(10, 30.0, 1.0), (50, 25.0, 4.0), (100, 20.0, 8.0)]}}).axes
    assert [(text.xy, text.xyann) for text in axes.texts] == [((25.0, 4.0), (30.0, 1.0)), ((20.0, 8.0), (25.0, 4.0))]
    (markers,) = axes.collections
    assert markers.get_offsets().tolist() == [[30.0, 1.0], [25.0, 4.0], [20.0, 8.0]]
    assert list(markers.get_sizes()) == sorted(markers.get_sizes())
    assert axes.get_xscale() == "linear"
    (wide,) = perplexity_paths({"Tiny": {"CE": [(10, 1400.0, 1.0), (100, 20.0, 8.0)]}}).axes
    assert wide.get_xscale() == "log"


def test_the_distribution_is_the_share_of_at_least_so_many():
    figure = lms_distribution({"CE": {"target": [0, 1, 1, 4], "control": [0, 0, 0, 1]}})
    (axes,) = figure.axes
    solid, dashed = (line for line in axes.get_lines() if len(line.get_xdata()))
    assert list(solid.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(solid.get_ydata()) == [75.0, 25.0, 25.0, 25.0, 0.0]
    assert list(dashed.get_ydata()) == [25.0, 0.0, 0.0, 0.0, 0.0]
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
    assert legend(figure) == ["CE", FLOOR]


def test_seven_objectives_have_seven_strong_colors_and_the_legend_covers_nothing():
    objectives = {f"TF-IDF (tf=log, num_batches={i})": [(10, 30.0, 1.0), (100, 20.0, 8.0)] for i in range(7)}
    figure = perplexity_paths({f"Model {i}": objectives for i in range(2)})
    colors = {line.get_color() for line in figure.axes[0].get_lines()}
    assert len(colors) == 7
    assert all(min(matplotlib.colors.to_rgb(color)) < 0.5 for color in colors)
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= 5  # narrow enough for a phone
    box = figure.legends[0].get_window_extent()
    assert (box.x0 >= 0, box.x1 <= figure.bbox.width) == (True, True)
    assert all(box.y0 >= axes.get_window_extent().y1 for axes in figure.axes)
