"""``tfidf-tune weights`` from its arguments to its files."""

import csv
import io
import json
import sys

import pytest
from rich.style import Style

from tfidf_tune import cli
from tfidf_tune.commands.weights import main
from tfidf_tune.data import hf_tokenizer, text_blocks_dataset


@pytest.fixture(scope="module")
def arguments(text_file, tiny_checkpoint):
    return [str(text_file), "--tokenizer", str(tiny_checkpoint), "--block-size", "32", "--num-blocks", "40"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("working_folder"))


def tokens_csv(folder):
    with (folder / "tables" / "tokens.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_it_shows_blocks_and_tables_and_writes_the_files(arguments, tmp_path, capsys, text_file, tiny_checkpoint):
    main([*arguments, "--num-batches", "2", "--output-dir", str(tmp_path / "out"), "--show", "2"])
    output = capsys.readouterr().out
    assert output.count(", 16 blocks in the window, tf=count") == 2
    assert "\x1b" not in output
    for words in ("Most up-weighted tokens", "With tf=count, the 10 most", "full from mini-batch 2 of 5"):
        assert words in output
    assert str(tmp_path / "out" / "index.html") in output
    report = json.loads((tmp_path / "out" / "report.json").read_text("utf-8"))
    names = ["frequency_bands", "frequency_band_weights", "most_up_weighted", "most_down_weighted", "word_parts"]
    names += ["split_words"]
    assert [table["name"] for table in report["tables"]] == names
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    files = {"index.html", "report.json", "report.md", "tokens.png"}
    files |= {f"figures/frequency_bands.{suffix}" for suffix in ("png", "svg")}
    assert found == files | {f"tables/{name}.csv" for name in (*names, "tokens")}
    # Every token of the training data set's blocks but the first of each.
    dataset = text_blocks_dataset(hf_tokenizer(str(tiny_checkpoint)), source=str(text_file), block_size=32)
    assert sum(int(row["count"]) for row in tokens_csv(tmp_path / "out")) == 40 * 31
    assert {int(row["id"]) for row in tokens_csv(tmp_path / "out")} == set(dataset.blocks[:40, 1:].ravel().tolist())


def test_the_settings_reach_the_weights(arguments, tmp_path, capsys):
    settings = ["--tf", "log", "--max-weight", "1.25", "--batch-size", "5", "--num-batches", "3", "--no-shuffle"]
    main([*arguments, *settings, "--min-count", "4", "--output-dir", str(tmp_path)])
    output = capsys.readouterr().out
    assert "Block 10, mini-batch 3, 15 blocks in the window, tf=log" in output  # the first one with a full window
    assert "tokens that occur 4 times or more" in output
    assert 1.2 < max(float(row["weight, log"]) for row in tokens_csv(tmp_path)) <= 1.2501
    provenance = json.loads((tmp_path / "report.json").read_text("utf-8"))["provenance"]
    assert provenance["max_weight"] == "1.25"
    assert "5 a mini-batch, as in the text" in provenance["blocks"]


def test_a_text_that_never_fills_the_window_and_blocks_by_number(arguments, tmp_path, capsys):
    main([*arguments, "--num-batches", "2000000000", "--output-dir", str(tmp_path), "--block", "17", "--block", "4"])
    output = capsys.readouterr().out
    assert "never full: 5 of 2000000000 mini-batches, 40 blocks" in output
    assert output.index("Block 17, mini-batch") < output.index("Block 4, mini-batch")
    main([*arguments, "--num-blocks", "1", "--block-size", "2", "--output-dir", str(tmp_path)])
    assert "Block 0, mini-batch 1, 1 blocks in the window" in capsys.readouterr().out


def test_several_files_are_one_text(arguments, tmp_path):
    texts = ["the old sailor", "a quiet child"] * 9
    (tmp_path / "both.txt").write_text("\n".join(texts))
    (tmp_path / "a.txt").write_text("\n".join(texts[:7]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[7:]))
    settings = [*arguments[1:3], "--block-size", "4"]
    main([str(tmp_path / "both.txt"), *settings, "--output-dir", str(tmp_path / "1")])
    main([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), *settings, "--output-dir", str(tmp_path / "2")])
    assert tokens_csv(tmp_path / "1") == tokens_csv(tmp_path / "2")


def test_a_terminal_gets_colors_and_an_output_without_unicode_question_marks(arguments, tmp_path, capsys, monkeypatch):
    Style._add.cache_clear()  # rich keeps the codes of the color system that was used first
    command = [*arguments, "--output-dir", str(tmp_path)]
    with monkeypatch.context() as patched:
        patched.setattr(type(sys.stdout), "isatty", lambda self: True)
        for name, value in (("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
            patched.setenv(name, value)
        patched.delenv("NO_COLOR", raising=False)
        main(command)
    assert "\x1b[30;48;2;" in capsys.readouterr().out
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "weights", *command])
    cli.main()
    stream.flush()
    assert b"?the" in stream.buffer.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--block-size", "9999999"], "fewer tokens than one block of 9999999: lower --block-size"),
        (["--column", "body"], "no column 'body'"),
        (["--tokenizer", "./nowhere"], "no such folder: './nowhere'"),
        (["--tokenizer", "."], "the folder '.' has no tokenizer files"),
        (["--max-weight", "0.5"], "max_weight is 0.5"),
        (["--block", "40"], "the text has the blocks 0 to 39"),
        (["--block", "-1"], "the text has the blocks 0 to 39"),
        (["--num-blocks", "9", "--no-shuffle", "--block", "8"], "incomplete mini-batch, which training leaves out"),
        (["--output-dir", "mine"], "has files but no report"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(change, message, arguments, tmp_path):
    tmp_path.joinpath("mine").mkdir()
    tmp_path.joinpath("mine", "thesis.tex").write_text("mine")
    change = [str(tmp_path / part) if part == "mine" else part for part in change]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main([*arguments, "--output-dir", str(tmp_path / "out"), *change])
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_files_without_text_are_refused_and_a_missing_one_before_others_are_read(arguments, tmp_path):
    contents = {"empty.txt": "", "blank.txt": " \n\n", "broken.jsonl": "{"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    cases = {
        "empty.txt": r"empty\.txt' is empty",
        "blank.txt": "has fewer tokens than one block",
        "broken.jsonl missing.txt": r"missing\.txt",
    }
    for names, message in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            main([*(str(tmp_path / name) for name in names.split()), *arguments[1:]])


@pytest.mark.parametrize(
    "change",
    [
        *("--tf tanh", "--show 0", "--show 3 --block 2", "--block-size 1", "--num-batches 99999999999999999999"),
        *("--seed 99999999999999999999", "--max-weight 1e308"),
    ],
)
def test_options_out_of_their_range_are_usage_errors(change, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, *change.split()])
    assert change.split()[0] in capsys.readouterr().err


def test_a_missing_tokenizer_is_explained_with_an_example(text_file, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tfidf-tune", "weights", str(text_file)])
    with pytest.raises(SystemExit, match=r"^error: --tokenizer is missing.*--tokenizer EleutherAI/pythia-1\.4b$"):
        cli.main()
