import dataclasses

import pytest
from analysis_fakes import CE, CONTROLS, TARGETS

from tfidf_tune.analysis import CheckpointResult, plot_lms_progress


def results():
    return [
        CheckpointResult(
            objective,
            progress,
            dataclasses.replace(TARGETS, avg_lms=lms),
            dataclasses.replace(CONTROLS, avg_lms=floor),
            20.0,
        )
        for objective, lms_values, floor in [
            ("CE", (2.1, 9.0, 24.0, 41.0, 63.3), 1.6),
            ("TF-IDF", (2.0, 4.0, 9.5, 17.0, 24.1), 1.5),
            ("Goldfish k=4", (1.9, 2.4, 3.7, 5.0, 6.2), 1.55),
        ]
        for progress, lms in zip((10, 25, 50, 75, 100), lms_values, strict=True)
    ]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_suffix_sets_the_format(tmp_path, suffix, magic):
    path = tmp_path / f"lms.{suffix}"
    plot_lms_progress(results(), path)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5_000


def test_only_the_figure_is_left_in_the_folder(tmp_path):
    plot_lms_progress(results(), tmp_path / "lms.png")
    assert [file.name for file in tmp_path.iterdir()] == ["lms.png"]


def test_an_unknown_format_leaves_nothing_behind(tmp_path):
    with pytest.raises(ValueError, match="'docx' is not supported"):
        plot_lms_progress(results(), tmp_path / "lms.docx")
    assert list(tmp_path.iterdir()) == []


def test_every_objective_is_in_the_legend(tmp_path):
    path = tmp_path / "lms.svg"
    plot_lms_progress(results(), path)
    svg = path.read_text()
    for name in ("CE", "TF-IDF", "Goldfish k=4", "never injected (floor)"):
        assert f"<!-- {name} -->" in svg


def test_the_order_of_the_checkpoints_does_not_matter(tmp_path):
    by_progress = {10: 3, 25: 1, 50: 0, 75: 4, 100: 2}
    plot_lms_progress(results(), tmp_path / "a.png")
    plot_lms_progress(sorted(results(), key=lambda result: by_progress[result.progress]), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_the_floor_is_that_of_the_controls(tmp_path):
    raised = [dataclasses.replace(r, controls=dataclasses.replace(CONTROLS, avg_lms=9.0)) for r in results()]
    plot_lms_progress(results(), tmp_path / "a.png")
    plot_lms_progress(raised, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_more_objectives_than_colours_can_be_drawn(tmp_path):
    plot_lms_progress([dataclasses.replace(CE, objective=f"o{i}") for i in range(9)], tmp_path / "lms.png")
    assert (tmp_path / "lms.png").exists()
