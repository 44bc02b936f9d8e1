"""``tfidf-tune data copies``: what repeats in a text, in the terminal, on a page and in JSON."""

import json
import random
from pathlib import Path

import pytest
from helpers.fakes.data import random_text, write_folder, write_rows
from helpers.processes.ranks import kill_when_opening

from tfidf_tune.commands.data import main
from tfidf_tune.corpus.advice import ADVICE, DOCUMENTS, FRAME, STRETCHES
from tfidf_tune.data import hf_tokenizer


@pytest.fixture(scope="module")
def texts():
    """60 documents; three have a copy, and six have a passage in common."""
    made = [random_text(seed) for seed in range(60)]
    made += made[:3]
    made += [f"{random_text(100 + number)} {random_text(500, 150)}" for number in range(6)]
    random.Random(0).shuffle(made)
    return made


def files_below(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_terminal_page_and_json_say_the_same_and_end_with_the_advice(texts, tmp_path, capsys):
    source = write_folder(tmp_path / "texts", texts)
    main(["copies", source, "--output-dir", str(tmp_path / "page")])
    out = " ".join(capsys.readouterr().out.split())
    found = json.loads((tmp_path / "page" / "copies.json").read_text())
    assert found["texts"] == [source]
    assert f"| Documents | {len(texts)} |" in out
    assert (found["documents"], found["exact_copies"]) == (len(texts), 3)
    assert f"| Documents equal to an earlier one | 3 | {100 * 3 / len(texts):.1f} |" in out
    assert out.endswith(f"{DOCUMENTS} {STRETCHES}".replace("  ", " "))
    assert [advice["setting"] for advice in found["advice"]] == [
        DOCUMENTS.setting,
        STRETCHES.setting,
    ]
    page = (tmp_path / "page" / "index.html").read_text()
    assert "dataset.deduplicate=minhash" in page
    assert "Stretches that take the most text" in page
    assert not (tmp_path / "page.search").exists()
    # The same in JSON on standard output.
    main(["copies", source, "--output-dir", str(tmp_path / "page"), "--json"])
    assert json.loads(capsys.readouterr().out) == found


def test_without_text_no_file_has_an_excerpt(texts, tmp_path, capsys):
    source = write_folder(tmp_path / "texts", texts)
    main(["copies", source, "--no-text", "--output-dir", str(tmp_path / "page"), "--verbose"])
    written = [capsys.readouterr().out.encode(), *files_below(tmp_path / "page").values()]
    for text in texts:
        stretches = [text.encode()[start : start + 40] for start in range(0, 700, 40)]
        for content in written:
            assert not any(stretch in content for stretch in stretches)


def test_a_tokenizer_counts_tokens(texts, tmp_path, embedded_tokenizer_folder, capsys):
    source = write_rows(tmp_path / "texts.jsonl", texts)
    name = str(embedded_tokenizer_folder)
    main(["copies", source, "--tokenizer", name, "--json", "--output-dir", str(tmp_path / "page")])
    found = json.loads(capsys.readouterr().out)
    tokenizer = hf_tokenizer(name)
    assert found["tokens"] == sum(
        len(tokenizer.encode(text, add_bos=False, add_eos=False)) for text in texts
    )


def test_of_conversations_the_answers_count(tmp_path, capsys):
    frame = random_text(1, 80)
    rows = []
    for number in range(40):
        answer = f"{frame if number % 5 == 0 else ''} {random_text(number + 100, 60)}"
        # In all of them, and not learned.
        question = {
            "role": "user",
            "content": random_text(7, 90),
        }
        rows.append({"messages": [question, {"role": "assistant", "content": answer}]})
    main(
        [
            "copies",
            write_rows(tmp_path / "chats.jsonl", rows),
            "--json",
            "--output-dir",
            str(tmp_path / "page"),
        ]
    )
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "These are conversations" in err
    assert [stretch["documents"] for stretch in found["frames"]] == [8]
    assert found["frames"][0]["excerpt"] in frame
    assert [advice["setting"] for advice in found["advice"]] == [FRAME.setting]


def test_a_command_that_was_killed_goes_on_and_another_text_begins_anew(texts, tmp_path, capfd):
    source = write_folder(tmp_path / "texts", texts)
    main(["copies", source, "--output-dir", str(tmp_path / "whole")])
    command = ["copies", source, "--output-dir", str(tmp_path / "cut")]
    kill_when_opening(tmp_path / "cut.search" / "measured" / "completions" / "00001", main, command)
    capfd.readouterr()
    main(command)
    assert "Finding near copies" not in capfd.readouterr().err
    assert (tmp_path / "cut" / "copies.json").read_bytes() == (
        tmp_path / "whole" / "copies.json"
    ).read_bytes()
    kill_when_opening(tmp_path / "cut.search" / "measured" / "completions" / "00001", main, command)
    write_rows(tmp_path / "texts" / "0.jsonl", [*texts, "more"])
    main(command)
    assert json.loads((tmp_path / "cut" / "copies.json").read_text())["exact_copies"] > 3


def test_a_folder_of_the_user_and_a_missing_column_are_refused_before_work_begins(
    texts, tmp_path, capfd
):
    source = write_rows(tmp_path / "texts.jsonl", [{"body": text} for text in texts])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("a")
    with pytest.raises(ValueError, match=r"mine has files but no report"):
        main(["copies", source, "--column", "body", "--output-dir", str(tmp_path / "mine")])
    assert "Finding" not in capfd.readouterr().err
    with pytest.raises(
        ValueError, match=r"no column 'text'.*\['body'\]: name one, as by .*--column body"
    ):
        main(["copies", source, "--output-dir", str(tmp_path / "page")])
    assert not (tmp_path / "page").exists()
    assert not (tmp_path / "page.search").exists()


def test_each_advice_is_one_override_that_a_run_takes():
    for advice in ADVICE:
        assert all("=" in setting for setting in advice.setting.split())


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_pages_quote_the_advice_of_the_code(page):
    text = (Path(__file__).parents[2] / page).read_text()
    block = text.partition("<!-- advice -->\n")[2].partition("<!-- advice end -->")[0]
    _, _, *rows = block.strip().splitlines()
    assert rows == [
        f"| {one.text} | {one.advice}. {one.reason} | `{one.setting}` |" for one in ADVICE
    ]
