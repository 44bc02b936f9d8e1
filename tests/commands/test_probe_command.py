import json
import os
import shutil
from unittest.mock import Mock

import peft
import pytest
from helpers.fakes.tiny_llama import teach

from tfidf_tune.commands.probe import main
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model

SMALL = ["--num-targets", "4", "--num-controls", "3", "--block-size", "32", "--min-repeats", "2"]
QUICK = [
    "--prefix-lengths",
    "8",
    "16",
    "--max-new-tokens",
    "12",
    "--device",
    "cpu",
    "--batch-size",
    "4",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory, text_file):
    """The shared text as rows of two documents each, one of them 21 times, and unseen text."""
    folder = tmp_path_factory.mktemp("texts")
    lines = text_file.read_text().splitlines()
    rows = [f"{first}\n{second}" for first, second in zip(lines[::2], lines[1::2], strict=True)][
        :60
    ]
    words = [
        "amber",
        "birch",
        "cobalt",
        "delta",
        "ember",
        "fjord",
        "garnet",
        "hazel",
        "indigo",
        "juniper",
        "kelp",
    ]
    unseen = [
        " ".join(words[(i * j + j // 7 + i) % len(words)] for j in range(60)) for i in range(8)
    ]
    for name, bodies in (("training", [*rows, *[rows[7]] * 20]), ("unseen", unseen)):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"body": body}) + "\n" for body in bodies)
        )
    return folder


@pytest.fixture(scope="module")
def command(texts, tiny_checkpoint):
    """The arguments of ``probe make`` for a file."""
    return lambda file: [
        "make",
        str(texts / "training.jsonl"),
        "--tokenizer",
        str(tiny_checkpoint),
        "--output",
        str(file),
        "--column",
        "body",
        "--controls-source",
        str(texts / "unseen.jsonl"),
        *SMALL,
    ]


@pytest.fixture
def make(command, tmp_path):
    def run(*arguments, output="probe.jsonl"):
        main([*command(tmp_path / output), *arguments])
        return tmp_path / output

    return run


@pytest.fixture(scope="module")
def probe_file(command, tmp_path_factory):
    file = tmp_path_factory.mktemp("probe") / "probe.jsonl"
    main(command(file))
    return file


# ---- make


def test_make_writes_a_file_and_says_what_it_found(make, capsys):
    file = make()
    passages = read_probe_file(file)
    assert [passage.kind for passage in passages] == ["target"] * 4 + ["control"] * 3
    assert passages[0].num_injections >= 21
    out = capsys.readouterr().out
    for words in (
        "Text: 80 documents",
        "Targets: 4; ",
        "which occur",
        "Controls: 3; 0 candidates share text",
    ):
        assert words in out
    assert "tfidf-tune probe audit MODEL --probe-file" in out
    before = file.read_bytes()
    with pytest.raises(
        ValueError,
        match=r"probe\.jsonl exists already: name another file, or replace it by --overwr",
    ):
        make("--seed", "1")
    assert file.read_bytes() == before
    make("--seed", "1", "--overwrite")
    assert file.read_bytes() != before
    make("--num-targets", "1", "--num-controls", "0", output="one.jsonl")
    assert (
        f"1 are duplicates, which occur {passages[0].num_injections} times, "
        in capsys.readouterr().out
    )
    fewer = read_probe_file(make("--num-controls", "900", output="fewer.jsonl"))
    assert 3 < sum(passage.kind == "control" for passage in fewer) < 900
    assert "There are no more passages of 32 tokens" in capsys.readouterr().out


def test_numbers_out_of_range_are_usage_errors_with_the_range(capsys):
    make = ["make", "text.txt", "--tokenizer", "model", "--output", "probe.jsonl"]
    audit = ["audit", "model"]
    cases = [
        *((make, "--num-controls", value, 0) for value in ("-1", "1" + "0" * 400)),
        *((make, "--seed", value, 0) for value in ("-1", "1" + "0" * 400)),
        *((make, "--num-targets", value, 1) for value in ("0", "2.5", "many")),
        (make, "--block-size", "1", 2),
        (audit, "--prefix-lengths", "0", 1),
        (audit, "--offset", "-1", 0),
    ]
    for needed, option, value, least in cases:
        with pytest.raises(SystemExit, match="2"):
            main([*needed, option, value])
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"argument {option}: '{value[:5]}" in message
        most = 2**63 - 1 if option == "--seed" else 2**31 - 1
        assert message.endswith(f"is not a whole number from {least} to {most}")


def test_an_output_that_cannot_be_written_is_refused_before_the_text_is_read(
    make, tmp_path, monkeypatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(
        "tfidf_tune.passages.make_probe", lambda *_: pytest.fail("the text was read")
    )
    for name in ("folder", "pipe"):
        with pytest.raises(
            ValueError, match=rf"{name} is a folder or a device: --output must name a file"
        ):
            make("--overwrite", output=name)
    with pytest.raises(
        OSError, match=r"--output .*/new cannot be written: .*notes\.txt is not a writable folder"
    ):
        make(output="notes.txt/new/a.jsonl")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "notes.txt").read_text() == "mine"


# ---- audit


def audit(folder, *arguments):
    main(["audit", *map(str, arguments), "--accept-unproven", "--output-dir", str(folder)])
    return json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))


def test_a_model_that_has_memorized_the_targets_is_detected_also_from_its_results(
    make, tiny_checkpoint, tmp_path, capsys
):
    # No two passages start alike, so the model can memorize all of them.
    file = make("--passages", "random")
    folder = tmp_path / "audit"
    model = tmp_path / "run" / "last"
    teach(load_model(tiny_checkpoint), file, known=7).save_pretrained(model)
    hf_tokenizer(str(tiny_checkpoint)).save_pretrained(model)
    report = audit(folder, model, "--probe-file", file, *QUICK, "--show-passages")
    assert report["title"] == "What run/last recites"
    assert report["verdict"] == (
        "run/last: 4 of 4 passages are recited further than unseen text; 4 of 4 passages verbatim "
        "for up to 12 tokens, about 4 words. More may be recited than was seen: the positive "
        "control takes 10 controls, there are 3. 3 of 4 passages are brought out by their own "
        "beginning and not by that of another passage."
    )
    tables = {table["name"]: table["rows"] for table in report["tables"]}
    assert [row[:2] for row in tables["by_prefix_length"]] == [[8, 12.0], [16, 12.0]]
    assert tables["targets_and_controls"][1][5] < 12
    piece, *_ = report["examples"][0]["continuations"][0]["pieces"]
    assert piece == {"text": report["examples"][0]["truth"], "recited": True}
    assert (folder / "report" / "index.html").is_file()
    assert "4 of 4 passages verbatim" in " ".join(capsys.readouterr().out.split())

    results = (folder / "evaluation").rename(tmp_path / "results")
    assert audit(folder, "--results", results)["verdict"] == report["verdict"]

    for name in ("first", "second"):
        (tmp_path / "both" / name).mkdir(parents=True)
        for written in results.rglob("*.json*"):
            text = written.read_text().replace(str(model), f"some/{name}")
            (tmp_path / "both" / name / written.name).write_text(text)
    with pytest.raises(
        ValueError, match=r"both holds the results of several runs: .*both/first, .*both/second"
    ):
        audit(folder, "--results", tmp_path / "both")


def make_adapter(model, folder, base):
    peft.get_peft_model(
        load_model(model), peft.LoraConfig(target_modules=["q_proj"], r=2)
    ).save_pretrained(folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    return folder


def test_an_adapter_is_evaluated_on_its_base(probe_file, tiny_checkpoint, tmp_path, monkeypatch):
    evaluate = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("tfidf_tune.tasks.evaluation.evaluate", evaluate)
    adapter = make_adapter(tiny_checkpoint, tmp_path / "adapter", str(tiny_checkpoint))
    arguments = [
        "audit",
        str(adapter),
        "--probe-file",
        str(probe_file),
        *QUICK,
        "--tokenizer",
        str(tiny_checkpoint),
    ]
    other = str(shutil.copytree(tiny_checkpoint, tmp_path / "other"))
    for base, expected in (((), str(tiny_checkpoint)), (("--base", other), other)):
        with pytest.raises(KeyboardInterrupt):
            main([*arguments, *base])
        expected_args = {
            "pretrained": expected,
            "peft": str(adapter),
            "tokenizer": str(tiny_checkpoint),
        }
        assert evaluate.call_args.args[0] == expected_args
    nameless = make_adapter(tiny_checkpoint, tmp_path / "nameless", None)
    with pytest.raises(
        ValueError, match="adapter .*nameless names no base model: name it by --base"
    ):
        main(["audit", str(nameless), *arguments[2:]])


def test_audits_that_cannot_work_are_refused_before_a_model_is_loaded(
    probe_file, tiny_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("the model was loaded"))
    (tmp_path / "empty").mkdir()
    names = {"model": tiny_checkpoint, "probe": probe_file, "empty": tmp_path / "empty"}
    neither = "name either a MODEL to evaluate and its --probe-file, or the --results of a model"
    for arguments, error, named in (
        ([], ValueError, neither),
        (["some/model", "--results", "."], ValueError, neither),
        (
            ["--results", ".", "--bos", "true", "--probe-file", "p"],
            ValueError,
            "--bos, --probe-file: for a MODEL that is asked, not for --results",
        ),
        (["some/model"], ValueError, neither),
        (
            ["./gone/model", "--probe-file", "{probe}"],
            FileNotFoundError,
            "no folder gone/model: name a Hugging Face model .* or a hub id",
        ),
        (
            ["{model}", "--probe-file", "gone.jsonl"],
            FileNotFoundError,
            r"no such probe file: 'gone\.jsonl'; .*`tfidf-tune probe make`",
        ),
        (
            ["{model}", "--probe-file", "{probe}", "--base", "b"],
            ValueError,
            "--base is for an adapter, and .*: leave out --base",
        ),
        (
            ["{model}", "--probe-file", "{probe}"],
            ValueError,
            r"'target-0000' has 32 tokens, .*\(100\): lower one of them",
        ),
        (
            ["--results", "{empty}"],
            FileNotFoundError,
            "no results .*empty .*: evaluate by `tfidf-tune eval` with --log_samples",
        ),
        (
            ["{model}", "--probe-file", "{probe}", *QUICK, "--dtype", "int8"],
            ValueError,
            "dtype 'int8': choose one of auto, float32",
        ),
        (
            ["{model}", "--probe-file", "{probe}", *QUICK, "--device", "tpu"],
            ValueError,
            "no device 'tpu' on this machine: choose one of cpu",
        ),
        (
            ["{model}", "--probe-file", "{probe}", *QUICK, "--device", "cuda"],
            ValueError,
            "no device 'cuda' on this machine: choose one of cpu",
        ),
    ):
        with pytest.raises(error, match=named):
            main(
                [
                    "audit",
                    *(one.format(**names) for one in arguments),
                    "--output-dir",
                    str(tmp_path / "audit"),
                ]
            )
        assert not (tmp_path / "audit").exists()
