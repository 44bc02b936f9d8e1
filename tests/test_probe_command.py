import errno
import json
import os

import pytest
import torch

from tfidf_tune.analysis import load_model
from tfidf_tune.commands.probe import main
from tfidf_tune.data import hf_tokenizer, read_probe_file

SMALL = ["--num-targets", "4", "--num-controls", "3", "--block-size", "32", "--min-repeats", "2"]
QUICK = ["--prefix-lengths", "8", "16", "--max-new-tokens", "12", "--device", "cpu", "--batch-size", "4"]


@pytest.fixture
def training_file(tmp_path, text_file):
    """The shared text as rows of two documents each, one of them 21 times."""
    lines = text_file.read_text().splitlines()
    rows = [f"{first}\n{second}" for first, second in zip(lines[::2], lines[1::2], strict=True)][:60]
    file = tmp_path / "training.jsonl"
    file.write_text("".join(json.dumps({"body": row}) + "\n" for row in [*rows, *[rows[7]] * 20]))
    return file


@pytest.fixture
def unseen_file(tmp_path):
    file = tmp_path / "unseen.jsonl"
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
        "onyx",
    ]
    rows = [" ".join(words[(i * j + j // 7 + i) % len(words)] for j in range(60)) for i in range(8)]
    file.write_text("".join(json.dumps({"body": row}) + "\n" for row in rows))
    return file


@pytest.fixture
def make(training_file, unseen_file, tiny_checkpoint, tmp_path):
    def run(*arguments, output="probe.jsonl", source=training_file):
        file = tmp_path / output
        common = ["--tokenizer", str(tiny_checkpoint), "--output", str(file), "--column", "body"]
        main(["make", str(source), *common, "--controls-source", str(unseen_file), *SMALL, *arguments])
        return file

    return run


def test_make_writes_a_file_that_reads_back_and_says_what_it_found(make, capsys):
    passages = read_probe_file(make())
    assert [passage.kind for passage in passages] == ["target"] * 4 + ["control"] * 3
    assert passages[0].num_injections >= 21
    out = capsys.readouterr().out
    assert "Text: 80 documents" in out
    assert "Targets: 4; " in out
    assert "stand" in out
    assert "Controls: 3; 0 were refused" in out
    assert "tfidf-tune probe audit MODEL --probe-file" in out


def test_make_keeps_a_file_that_is_there_unless_told_to_replace_it(make):
    file = make()
    before = file.read_bytes()
    with pytest.raises(ValueError, match=r"probe\.jsonl is there already: name another file, or replace it by --overw"):
        make("--seed", "1")
    assert file.read_bytes() == before
    make("--seed", "1", "--overwrite")
    assert file.read_bytes() != before


@pytest.mark.parametrize(
    ("option", "value", "least"),
    [
        *((option, "0", 1) for option in ("--num-targets", "--batch-size", "--max-new-tokens", "--prefix-lengths")),
        *((option, "-1", 0) for option in ("--num-controls", "--seed", "--offset")),
        ("--block-size", "1", 2),
        ("--min-repeats", "1", 2),
        ("--num-targets", "2.5", 1),
        ("--batch-size", "many", 1),
        ("--num-controls", "1" + "0" * 400, 0),
    ],
)
def test_a_number_out_of_range_is_named_with_the_range(option, value, least, capsys):
    needed = ["audit", "model"]
    if option in ("--num-targets", "--num-controls", "--block-size", "--min-repeats", "--seed"):
        needed = ["make", "text.txt", "--tokenizer", "model", "--output", "probe.jsonl"]
    with pytest.raises(SystemExit) as ended:
        main([*needed, option, value])
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option}: '{value[:5]}" in message
    most = 2**63 - 1 if option == "--seed" else 2**31 - 1
    assert message.endswith(f"is not a whole number from {least} to {most}")


def test_passages_longer_than_any_document_are_refused_however_long(make):
    with pytest.raises(ValueError, match=r"found 0 passages of 1000000000 tokens .* the longest of \d+ tokens"):
        make("--block-size", "1000000000")


def test_a_place_that_cannot_be_written_is_refused_before_the_text_is_read(make, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("tfidf_tune.data.make_probe", lambda *_: pytest.fail("the text was read"))
    for name in ("folder", "pipe"):
        with pytest.raises(ValueError, match=rf"{name} is a folder or a device: --output must name a file"):
            make("--overwrite", output=name)
    with pytest.raises(OSError, match=r"--output .*/new cannot be written: .*notes\.txt is not a writable folder"):
        make(output="notes.txt/new/a.jsonl")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_is_one_message_and_keeps_the_old_file(make, monkeypatch):
    file = make()
    before = file.read_bytes()

    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfidf_tune._files.sync_to_disk", full)
    with pytest.raises(OSError, match=r"cannot write the probe file '.*/probe\.jsonl': No space left on device$"):
        make("--seed", "1", "--overwrite")
    assert file.read_bytes() == before
    assert not list(file.parent.glob(".probe*"))


@pytest.fixture
def reciting_model(tiny_checkpoint, tmp_path):
    """Trains the tiny Llama on nothing but the targets of a probe file, until it knows them by heart."""

    def train(probe_file):
        model = load_model(tiny_checkpoint).train()
        ids = torch.tensor([passage.token_ids for passage in read_probe_file(probe_file) if passage.kind == "target"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(250):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        folder = tmp_path / "run" / "checkpoint_100pct"
        model.save_pretrained(folder)
        hf_tokenizer(str(tiny_checkpoint)).save_pretrained(folder)
        return folder

    return train


@pytest.fixture
def audit(tmp_path):
    def run(*arguments):
        folder = tmp_path / "audit"
        main(["audit", *map(str, arguments), "--output-dir", str(folder)])
        return json.loads((folder / "report" / "report.json").read_text(encoding="utf-8"))

    return run


def test_a_model_that_knows_the_targets_by_heart_is_found_out(make, reciting_model, audit, tmp_path, capsys):
    # From its second token on a passage is alone, so the model can tell the targets apart.
    file = make("--passages", "random")
    report = audit(reciting_model(file), "--probe-file", file, *QUICK)
    assert report["statements"][0] == (
        "Too few passages for a verdict (4 targets, 3 controls): it takes at least 10 of each. 4 of the targets are "
        "recited verbatim nevertheless."
    )
    assert report["statements"][1].startswith(
        "It recites 4 of the 4 targets (100 %) verbatim: all that was compared, up to 12"
    )
    tables = {table["name"]: table["rows"] for table in report["tables"]}
    assert [row[:2] for row in tables["by_prefix_length"]] == [[8, 12.0], [16, 12.0]]
    assert tables["targets_and_controls"][1][5] < 12
    (text, recited), *_ = (
        (piece["text"], piece["recited"]) for piece in report["examples"][0]["continuations"][0]["pieces"]
    )
    assert recited
    assert text == report["examples"][0]["truth"]
    assert (tmp_path / "audit" / "report" / "index.html").is_file()
    assert "It recites 4 of the 4 targets" in capsys.readouterr().out


def test_results_that_are_there_are_audited_without_the_model(make, tiny_checkpoint, audit, tmp_path):
    first = audit(tiny_checkpoint, "--probe-file", make(), *QUICK)
    (tmp_path / "audit" / "evaluation").rename(tmp_path / "results")
    assert audit("--results", tmp_path / "results")["statements"] == first["statements"]


def test_each_audit_reports_its_own_results_alone(make, tiny_checkpoint, audit):
    audit(tiny_checkpoint, "--probe-file", make(), *QUICK)
    again = audit(tiny_checkpoint, "--probe-file", make(output="other.jsonl"), *QUICK, "--prefix-lengths", "20")
    assert again["provenance"]["Prompts (tokens)"] == "20"


def test_an_adapter_is_put_on_its_base(make, tiny_checkpoint, tmp_path, monkeypatch):
    adapter = make_adapter(tiny_checkpoint, tmp_path / "adapter")
    calls = record_evaluations(monkeypatch)
    for base, expected in (((), str(tiny_checkpoint)), (("--base", "some/base"), "some/base")):
        arguments = ["audit", str(adapter), "--probe-file", str(make(output=f"{expected[-4:]}.jsonl")), *QUICK]
        with pytest.raises(Stopped):
            main([*arguments, "--tokenizer", str(tiny_checkpoint), *base])
        assert calls[-1][0] == {"pretrained": expected, "peft": str(adapter), "tokenizer": str(tiny_checkpoint)}


def test_the_papers_prompts_are_the_group_of_tasks_and_others_one_task(make, tiny_checkpoint, monkeypatch):
    calls = record_evaluations(monkeypatch)
    file = str(make("--block-size", "110", "--num-controls", "1", "--num-targets", "2"))
    for prompts, task in ((["32", "50", "100"], "tfidf_memorization"), (["32", "50"], "tfidf_memorization_prefixes")):
        with pytest.raises(Stopped):
            main(["audit", str(tiny_checkpoint), "--probe-file", file, "--offset", "1", "--prefix-lengths", *prompts])
        assert calls[-1][1] == [task]
    assert calls[-1][2] == {"probe_file": file, "max_new_tokens": 128, "offset": 1, "prefix_lengths": [32, 50]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([], ValueError, "name either a MODEL to evaluate or the --results of one"),
        (["some/model", "--results", "."], ValueError, "name either a MODEL"),
        (["some/model"], ValueError, "a MODEL needs a --probe-file"),
        (["./gone/model", "--probe-file", "p"], FileNotFoundError, "there is no folder gone/model"),
        (["{model}", "--probe-file", "gone.jsonl"], FileNotFoundError, r"no such probe file: 'gone\.jsonl'"),
        (["{model}", "--probe-file", "{probe}", "--base", "b"], ValueError, "--base is for an adapter"),
        (["{model}", "--probe-file", "{probe}"], ValueError, "has 32 tokens, none after the first 100"),
        (["--results", "{empty}"], FileNotFoundError, "no results of our tasks below"),
    ],
)
def test_what_cannot_be_audited_is_refused(make, tiny_checkpoint, tmp_path, arguments, error, message):
    (tmp_path / "empty").mkdir()
    names = {"model": tiny_checkpoint, "probe": make(), "empty": tmp_path / "empty"}
    with pytest.raises(error, match=message):
        main(["audit", *(one.format(**names) for one in arguments), "--output-dir", str(tmp_path / "audit")])
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dtype", "foo"],
            "a model cannot be loaded with dtype 'foo': choose one of auto, float32, bfloat16, float16",
        ),
        (["--dtype", "int8"], "a model cannot be loaded with dtype 'int8': choose one of auto, float32"),
        (["--device", "tpu"], "there is no device 'tpu' on this machine: choose one of cpu$"),
        (["--device", "cuda"], "there is no device 'cuda' on this machine: choose one of cpu$"),
        (["--device", "mps"], "there is no device 'mps' on this machine"),
        (["--device", "meta"], "there is no device 'meta' on this machine"),
    ],
)
def test_a_model_is_not_loaded_with_settings_that_do_not_work(
    make, tiny_checkpoint, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    monkeypatch.setattr("lm_eval.simple_evaluate", lambda **_: pytest.fail("the model was loaded"))
    common = [str(tiny_checkpoint), "--probe-file", str(make()), *QUICK, "--output-dir", str(tmp_path / "audit")]
    with pytest.raises(ValueError, match=message):
        main(["audit", *common, *arguments])
    assert not (tmp_path / "audit").exists()


def test_an_adapter_without_a_base_is_refused(make, tiny_checkpoint, tmp_path):
    adapter = make_adapter(tiny_checkpoint, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="adapter names no base model: name it by --base"):
        main(["audit", str(adapter), "--probe-file", str(make()), *QUICK])


def test_results_of_two_models_are_refused(make, tiny_checkpoint, audit, tmp_path):
    audit(tiny_checkpoint, "--probe-file", make(), *QUICK)
    for name in ("first", "second"):
        results = tmp_path / "both" / name
        results.mkdir(parents=True)
        for file in (tmp_path / "audit" / "evaluation").rglob("*.json*"):
            (results / file.name).write_text(file.read_text().replace(str(tiny_checkpoint), f"some/{name}"))
    with pytest.raises(ValueError, match=r"both holds the results of 2 runs, .*: name one of them, or compare them by"):
        audit("--results", tmp_path / "both")


def test_a_folder_with_other_files_is_not_written_to(make, tiny_checkpoint, tmp_path):
    other = tmp_path / "audit" / "report" / "thesis.txt"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    with pytest.raises(ValueError, match="holds files and no report"):
        main(["audit", str(tiny_checkpoint), "--probe-file", str(make()), "--output-dir", str(tmp_path / "audit")])
    assert [path for path in (tmp_path / "audit").rglob("*") if path.is_file()] == [other]


def test_the_folder_is_named_after_the_last_two_parts(make, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = record_evaluations(monkeypatch)
    with pytest.raises(Stopped):
        main(["audit", str(tiny_checkpoint), "--probe-file", str(make()), *QUICK])
    expected = f"{tiny_checkpoint.parent.name}-{tiny_checkpoint.name}"
    assert calls[0][3].parent.as_posix() == f"runs/audit/{expected}/evaluation"


def test_a_missing_tokenizer_is_named(make):
    with pytest.raises(FileNotFoundError, match=r"no such folder: '\./gone'"):
        make("--tokenizer", "./gone")


def test_a_missing_column_is_named(make):
    with pytest.raises(ValueError, match=r"no column 'prose': name one of its columns \['body'\]"):
        make("--column", "prose")


def test_controls_of_the_embedded_corpus_are_said_to_be_of_another_domain(
    training_file, unseen_file, tiny_checkpoint, tmp_path, capsys, monkeypatch
):
    rows = [json.loads(line)["body"] for line in unseen_file.read_text().splitlines()]
    monkeypatch.setattr("tfidf_tune.data._probe_making.embedded_documents", lambda split: rows)
    common = ["--tokenizer", str(tiny_checkpoint), "--column", "body", "--output", str(tmp_path / "probe.jsonl")]
    main(["make", str(training_file), *common, *SMALL])
    assert "The controls are Python's documentation: another domain than your text" in capsys.readouterr().out


def make_adapter(base, folder):
    import peft

    peft.get_peft_model(load_model(base), peft.LoraConfig(target_modules=["q_proj"], r=2)).save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return folder


class Stopped(Exception):
    pass


def record_evaluations(monkeypatch):
    calls = []

    def evaluate(model_args, tasks, output_path, *, metadata, batch_size, device):
        calls.append((model_args, tasks, metadata, output_path))
        raise Stopped

    monkeypatch.setattr("tfidf_tune.tasks.evaluate", evaluate)
    return calls
