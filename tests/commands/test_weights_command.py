"""``tfidf-tune weights`` from its arguments to its files."""

import lxml.html
import pytest

from tfidf_tune.commands.weights import main
from tfidf_tune.data import hf_tokenizer, text_blocks_dataset


@pytest.fixture(scope="module")
def arguments(text_file, tiny_checkpoint):
    return [
        str(text_file),
        "--tokenizer",
        str(tiny_checkpoint),
        "--block-size",
        "32",
        "--num-blocks",
        "40",
    ]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("working_folder"))


def page(folder):
    return lxml.html.document_fromstring((folder / "index.html").read_text(encoding="utf-8"))


def headings(folder):
    return [
        heading.text_content()
        for heading in page(folder).xpath("//h3")
        if "mini-batch" in heading.text_content()
    ]


def test_it_prints_the_findings_and_a_table_and_writes_the_page(
    arguments, tmp_path, capsys, text_file, tiny_checkpoint
):
    main([*arguments, "--num-batches", "2", "--output-dir", str(tmp_path / "out"), "--show", "2"])
    output = capsys.readouterr().out
    for words in ("With tf=count, the 10 most", "| frequency rank "):
        assert words in output
    assert "full from mini-batch 2 of 5" in (tmp_path / "out" / "report.md").read_text("utf-8")
    assert str(tmp_path / "out" / "index.html") in output
    found = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    assert found == {"index.html", "report.json", "report.md", "tables/frequency_bands.csv"}
    shown = headings(tmp_path / "out")
    assert [heading.split(", ")[2] for heading in shown] == ["16 blocks in the window"] * 2
    # The tokens are those of the training data set's blocks.
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    dataset = text_blocks_dataset(tokenizer, source=str(text_file), block_size=32)
    first = int(shown[0].split(",")[0].removeprefix("Block "))
    details = page(tmp_path / "out").xpath("//p[@class='tokens'][1]/span/@data-details")
    for token, text in zip(dataset.blocks[first], details, strict=True):
        assert f"(id {token})" in text


def test_a_text_that_never_fills_the_window_and_blocks_by_number(arguments, tmp_path):
    main(
        [
            *arguments,
            "--num-batches",
            "2000000000",
            "--output-dir",
            str(tmp_path),
            "--block",
            "17",
            "--block",
            "4",
        ]
    )
    assert "never full: 5 of 2000000000 mini-batches, 40 blocks" in (
        tmp_path / "report.md"
    ).read_text("utf-8")
    assert [heading.split(",")[0] for heading in headings(tmp_path)] == ["Block 17", "Block 4"]
    main([*arguments, "--num-blocks", "1", "--block-size", "2", "--output-dir", str(tmp_path)])
    assert headings(tmp_path) == ["Block 0, mini-batch 1, 1 blocks in the window"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            ["--block-size", "9999999"],
            "fewer tokens than one block of 9999999: lower --block-size, or name more text",
        ),
        (["--column", "body"], r"has no column 'body', only \['text'\]: name one, .*--column text"),
        (
            ["--tokenizer", "./nowhere"],
            r"no such folder: '\./nowhere': name a folder with tokenizer\.json .* or a hub id",
        ),
        (
            ["--tokenizer", "."],
            r"the folder '\.' has no tokenizer files: name a folder with tokenizer\.json",
        ),
        (["--max-weight", "0.5"], r"max_weight is 0\.5: .*set it to a number from 1 to"),
        (["--block", "40"], "--block 40: the text has the blocks 0 to 39"),
        (
            ["--output-dir", "{folder}"],
            r"{folder} has files but no report \(report\.json\): give the report a folder",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_written(
    change, named, arguments, tmp_path
):
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.joinpath("thesis.tex").write_text("mine")
    with pytest.raises((ValueError, FileNotFoundError), match=named.format(folder=folder)):
        main(
            [
                *arguments,
                "--output-dir",
                str(tmp_path / "out"),
                *(part.format(folder=folder) for part in change),
            ]
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.tex"]


def test_files_without_text_are_refused_and_a_missing_one_before_others_are_read(
    arguments, tmp_path
):
    for name, content in {"empty.txt": "", "blank.txt": " \n\n", "broken.jsonl": "{"}.items():
        (tmp_path / name).write_text(content)
    for names, kind, message in (
        ("empty.txt", ValueError, "empty.txt' is empty: name a source with text"),
        (
            "blank.txt",
            ValueError,
            "blank.txt' has fewer tokens than one block of 32: lower --block-size, or name more",
        ),
        ("broken.jsonl missing.txt", FileNotFoundError, "no such file or folder: .*missing.txt"),
    ):
        with pytest.raises(kind, match=message):
            main([*(str(tmp_path / name) for name in names.split()), *arguments[1:]])
