import csv
import io
import json
import sys

import pytest
from rich.style import Style

from tfidf_tune import cli
from tfidf_tune.commands.weights import main


@pytest.fixture(scope="module")
def arguments(text_file, tiny_checkpoint):
    return [str(text_file), "--tokenizer", str(tiny_checkpoint), "--block-size", "32", "--num-blocks", "200"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("working_folder"))


def test_it_shows_a_block_and_the_tables_and_writes_the_files(arguments, tmp_path, capsys):
    main([*arguments, "--output-dir", str(tmp_path / "out"), "--show", "2"])
    output = capsys.readouterr().out
    assert output.count(", 128 blocks in the window, tf=count") == 2
    assert "\x1b" not in output
    for title in ("Most up-weighted tokens", "Most down-weighted tokens", "Words by their number of tokens"):
        assert title in output
    assert "With tf=count, the 10 most frequent tokens hold" in output
    assert "full from mini-batch 16 of 25 on" in output
    assert str(tmp_path / "out" / "index.html") in output
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "index.html",
        "tokens.png",
        "report.md",
        "report.json",
        "tables",
        "figures",
    }


def test_the_settings_reach_the_weights(arguments, tmp_path, capsys):
    settings = ["--tf", "log", "--max-weight", "1.25", "--batch-size", "5", "--num-batches", "3", "--no-shuffle"]
    main([*arguments, *settings, "--min-count", "4", "--output-dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert "Block 10, mini-batch 3, 15 blocks in the window, tf=log" in output  # the first one with a full window
    assert "tokens that occur 4 times or more" in output
    with (tmp_path / "tables" / "tokens.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert 1.2 < max(float(row["weight, log"]) for row in rows) <= 1.2501
    provenance = json.loads((tmp_path / "report.json").read_text("utf-8"))["provenance"]
    assert provenance["max_weight"] == "1.25"
    assert "5 a mini-batch, as in the text" in provenance["blocks"]


def test_a_window_longer_than_the_text_costs_nothing(arguments, tmp_path, capsys):
    printed = []
    for num_batches in ("2000000000", "25"):
        main([*arguments, "--num-batches", num_batches, "--block", "3", "--output-dir", str(tmp_path / num_batches)])
        printed.append(capsys.readouterr().out)
    assert "never full: 25 of 2000000000 mini-batches" in printed[0]
    tables = [(tmp_path / folder / "tables" / "tokens.csv").read_text() for folder in ("2000000000", "25")]
    assert tables[0] == tables[1]


def test_blocks_can_be_named(arguments, tmp_path, capsys):
    main([*arguments, "--output-dir", str(tmp_path), "--block", "17", "--block", "4"])
    output = capsys.readouterr().out
    assert output.index("Block 17, mini-batch") < output.index("Block 4, mini-batch")


def test_a_terminal_gets_colors_unless_they_are_unwanted(arguments, tmp_path, capsys, monkeypatch):
    Style._add.cache_clear()  # rich keeps the codes of the color system that was used first
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    main([*arguments, "--output-dir", str(tmp_path)])
    assert "\x1b[30;48;2;" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    main([*arguments, "--output-dir", str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


def test_a_text_that_never_fills_the_window_says_so(arguments, tmp_path, capsys):
    main([*arguments, "--num-blocks", "20", "--output-dir", str(tmp_path)])
    assert "never full: 2 of 16 mini-batches, 16 blocks" in capsys.readouterr().out


def test_a_block_of_two_tokens_is_enough(arguments, tmp_path, capsys):
    main([*arguments, "--num-blocks", "1", "--block-size", "2", "--output-dir", str(tmp_path)])
    assert "Block 0, mini-batch 1, 1 blocks in the window" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--block-size", "1"], "block_size is 1"),
        (["--block-size", "9999999"], "fewer tokens than one block of 9999999"),
        (["--column", "body"], "no column 'body'"),
        (["--tokenizer", "./nowhere"], "no such folder: './nowhere'"),
        (["--max-weight", "0.5"], "max_weight is 0.5"),
        (["--num-batches", "0"], "num_batches is 0"),
        (["--block", "200"], "the text has the blocks 0 to 199"),
        (["--block", "-1"], "the text has the blocks 0 to 199"),
        (["--num-blocks", "9", "--no-shuffle", "--block", "8"], "incomplete mini-batch, which training leaves out"),
    ],
)
def test_what_does_not_fit_is_refused_with_one_message_and_nothing_written(change, message, arguments, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main([*arguments, "--output-dir", str(tmp_path / "out"), *change])
    assert not (tmp_path / "out").exists()


def test_an_empty_file_is_refused(arguments, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match=r"empty\.txt' is empty"):
        main([str(tmp_path / "empty.txt"), *arguments[1:]])
    with pytest.raises(ValueError, match=r"blank\.txt' has fewer tokens than one block"):
        main([str(tmp_path / "blank.txt"), *arguments[1:]])


def test_a_folder_that_is_no_tokenizer_is_refused(arguments, tmp_path):
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        main([arguments[0], "--tokenizer", str(tmp_path)])


def test_a_folder_of_other_files_is_refused_before_any_work(arguments, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="holds files"):
        main(["missing.txt", "--tokenizer", "./nowhere", "--output-dir", str(tmp_path)])


@pytest.mark.parametrize(
    "change",
    [
        ["--tf", "tanh"],
        ["--show", "0"],
        ["--batch-size", "-1"],
        ["--show", "3", "--block", "2"],
        ["--num-batches", "99999999999999999999"],
        ["--block-size", "99999999999999999999"],
        ["--seed", "99999999999999999999"],
        ["--max-weight", "1e308"],
    ],
)
def test_options_out_of_their_range_are_usage_errors(change, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, *change])
    assert change[0] in capsys.readouterr().err


def test_a_missing_tokenizer_is_explained_with_an_example(text_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "weights", str(text_file)])
    with pytest.raises(SystemExit, match=r"^error: --tokenizer is missing.*--tokenizer EleutherAI/pythia-1\.4b$"):
        cli.main()


def test_an_output_without_unicode_gets_question_marks(arguments, tmp_path, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "weights", *arguments, "--output-dir", str(tmp_path)])
    cli.main()
    stream.flush()
    assert b"?the" in stream.buffer.getvalue()
