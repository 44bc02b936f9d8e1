import math

import matplotlib.colors
import pytest

from tfidf_tune.report._figures import lms_distribution, lms_progress, perplexity_paths

CURVES = {"CE": [(10, 1.0, 0.5), (100, 8.0, 1.0)], "TF-IDF": [(10, 1.0, 0.5), (100, 3.0, 1.0)]}


def lines(axes):
    return {line.get_label(): line for line in axes.get_lines() if len(line.get_xdata())}


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_progress_draws_each_objective_and_its_floor():
    figure = lms_progress({"Tiny": CURVES})
    (axes,) = figure.axes
    drawn = lines(axes)
    assert (list(drawn["TF-IDF"].get_xdata()), list(drawn["TF-IDF"].get_ydata())) == ([10, 100], [1.0, 3.0])
    floors = [line for line in axes.get_lines() if list(line.get_ydata()) == [0.5, 1.0]]
    assert [line.get_color() for line in floors] == [drawn[name].get_color() for name in CURVES]
    assert legend(figure) == ["CE", "TF-IDF", "never injected (the floor)"]
    assert axes.get_ylim()[0] == 0


def test_without_controls_no_floor_is_drawn_or_promised():
    figure = lms_progress({"Tiny": {"CE": [(10, 1.0, math.nan), (100, 8.0, math.nan)]}})
    assert len(figure.axes[0].get_lines()) == 1
    assert legend(figure) == ["CE"]
    assert legend(lms_distribution({"m": {"target": [1, 2], "control": []}})) == ["m"]


def test_every_model_has_a_panel_and_an_objective_one_colour():
    figure = lms_progress({"A": CURVES, "B": {"TF-IDF": CURVES["TF-IDF"]}})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["A", "B"]
    first, second = (lines(axes)["TF-IDF"].get_color() for axes in figure.axes)
    assert first == second
    assert legend(figure) == ["CE", "TF-IDF", "never injected (the floor)"]


def test_the_frontier_goes_along_the_checkpoints():
    figure = perplexity_paths(
        {"Tiny": {"CE": [(10, 30.0, 1.0), (50, 25.0, 4.0), (100, 20.0, 8.0)], "TF-IDF": [(100, 25.0, 3.0)]}}
    )
    (axes,) = figure.axes
    arrows = [(text.xy, text.xyann) for text in axes.texts]
    assert arrows == [((25.0, 4.0), (30.0, 1.0)), ((20.0, 8.0), (25.0, 4.0))]
    markers, single = axes.collections
    assert markers.get_offsets().tolist() == [[30.0, 1.0], [25.0, 4.0], [20.0, 8.0]]
    assert list(markers.get_sizes()) == sorted(markers.get_sizes())
    assert single.get_offsets().tolist() == [[25.0, 3.0]]
    assert axes.get_xscale() == "linear"
    assert legend(figure) == ["CE", "TF-IDF"]
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
    assert legend(figure) == ["CE", "never injected (the floor)"]


def test_seven_objectives_have_seven_colours_and_none_is_faint():
    labels = [f"objective {i}" for i in range(7)]
    (axes,) = lms_distribution({label: {"target": [1, 2], "control": []} for label in labels}).axes
    colours = {line.get_color() for line in axes.get_lines()}
    assert len(colours) == 7
    for colour in colours:
        assert min(matplotlib.colors.to_rgb(colour)) < 0.5


@pytest.mark.parametrize("num_models", [1, 6])
def test_figures_are_narrow_enough_for_a_phone_and_legends_cover_nothing(num_models):
    objectives = {f"TF-IDF (tf=log, num_batches={i})": [(10, 30.0, 1.0), (100, 20.0, 8.0)] for i in range(4)}
    figure = perplexity_paths({f"Model {i}": objectives for i in range(num_models)})
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= 5
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert all(box.y0 >= axes.get_window_extent().y1 for axes in figure.axes)
