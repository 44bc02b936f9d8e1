"""An audit is planned before its first question, and somebody else recomputes it."""

import json
import shutil
from pathlib import Path

import pytest
from helpers.fakes import tiny_audit

from tfidf_tune._files import file_sha256
from tfidf_tune.audit import audit, verify
from tfidf_tune.audit._record import _changed_attacks, _deciding, read_sums, write_sums
from tfidf_tune.commands.audit import main

pytestmark = pytest.mark.usefixtures("quick_reports")


def spec_of(folder, model, **changes):
    """An audit with a limit."""
    return tiny_audit.spec_of(folder, **{"model": str(model), "limits": "lms=5"} | changes)


@pytest.fixture(scope="module")
def audited(tiny_checkpoint, tmp_path_factory):
    """A folder with texts, a model, and its audit."""
    folder = tmp_path_factory.mktemp("audited")
    tiny_audit.write_texts(folder)
    shutil.copytree(tiny_checkpoint, folder / "model")
    notes = []
    result = audit(spec_of(folder, folder / "model"), notes.append)
    assert any(file_sha256(folder / "audit" / "plan.json") in note for note in notes)
    assert result.summary["plan"] == file_sha256(folder / "audit" / "plan.json")
    assert result.root == file_sha256(folder / "audit" / "SHA256SUMS")
    return folder


@pytest.fixture
def copy(audited, tmp_path):
    """A copy of the audit alone, as it is given to somebody else."""
    return Path(shutil.copytree(audited / "audit", tmp_path / "given"))


def states(folder):
    return {check.what: check.state for check in verify(folder).checks}


def test_all_is_the_same_for_somebody_else_and_what_needs_the_model_is_said(
    audited, copy, capsys, monkeypatch
):
    assert verify(copy).root == verify(audited / "audit").root
    found = states(copy)
    assert [what for what, state in found.items() if state != "same"] == ["likelihoods"]
    assert {"weights of the model", "texts", "controls and tokenizer"} < found.keys()
    assert found["24 scores of tfidf_memorization_prefixes, from the answers"] == "same"

    main(["verify", str(copy)])
    printed = capsys.readouterr().out
    assert "not checked  likelihoods (they need the model)" in printed
    assert printed.endswith(f"Root hash, of all files: {verify(copy).root}\n")

    root = verify(copy).root
    main(["verify", str(copy), "--root", root.upper()])
    assert capsys.readouterr().out.endswith(f"Root hash, of all files: {root}, as given\n")

    # Without model and texts at hand, the rest is still recomputed.
    away = audited.with_name("away")
    audited.rename(away)
    try:
        found = states(copy)
    finally:
        away.rename(audited)
    assert "changed" not in found.values()
    assert found["weights of the model"] == found["texts"] == "not checked"
    assert found["figures, tables and page, from the scores"] == "same"


def test_one_changed_byte_of_any_file_is_found(copy):
    names = [*read_sums(copy), "SHA256SUMS"]
    assert {"plan.json", "probe.jsonl", "passages.json", "report/index.html"} < {*names}
    assert any(name.startswith("evaluation/") for name in names)
    for name in names:
        content = (copy / name).read_bytes()
        changed = bytearray(content or b"figures are not drawn in tests")
        changed[len(changed) // 2] ^= 1
        (copy / name).write_bytes(changed)
        try:
            is_found = bool(verify(copy).changed)
        except ValueError:  # the list of hashes itself cannot be read
            is_found = name == "SHA256SUMS"
        assert is_found, name
        (copy / name).write_bytes(content)
    assert not verify(copy).changed
    (copy / "report" / "report.md").unlink()
    with pytest.raises(SystemExit, match="not as the audit left it: .* files of the audit"):
        main(["verify", str(copy)])
    (copy / "SHA256SUMS").unlink()
    with pytest.raises(
        ValueError, match="is no folder with SHA256SUMS: name the folder of an audit"
    ):
        main(["verify", str(copy)])


def test_an_audit_that_is_complete_but_not_the_given_one_is_refused(copy, capsys):
    given = verify(copy).root
    with pytest.raises(SystemExit, match="^error: the root hash of .* is .* you were given 0"):
        main(["verify", str(copy), "--root", "0" * 64])
    page = copy / "report" / "index.html"
    page.write_text(page.read_text() + "\n")
    write_sums(copy)
    root = file_sha256(copy / "SHA256SUMS")
    with pytest.raises(SystemExit) as failure:
        main(["verify", str(copy), "--root", given])
    # With a new list of hashes, only computing again and the given hash find it.
    assert failure.value.code == (
        "error: not as the audit left it: figures, tables and page, from the scores; the root "
        f"hash of {copy} is {root}, and you were given {given}: this is another audit, or it was "
        "made again"
    )
    for wrong in (given[:-1], f"{given[:-1]}g", f"{given}0"):
        with pytest.raises(SystemExit, match="2"):
            main(["verify", str(copy), "--root", wrong])
        assert "is not a SHA-256, which has 64 digits" in capsys.readouterr().err


def edit(file, change):
    file.write_text("".join(map(change, file.read_text().splitlines(keepends=True))))


def with_another_score(line):
    entry = json.loads(line)
    entry["doc"]["sample"]["lms"] += 1
    return json.dumps(entry) + "\n"


FORGERIES = {
    "24 scores of tfidf_memorization_prefixes, from the answers": lambda folder: edit(
        next(folder.rglob("samples_tfidf_memorization_prefixes_*")), with_another_score
    ),
    "figures, tables and page, from the scores": lambda folder: edit(
        folder / "report" / "audit.json", lambda line: line.replace('"value": 0.0', '"value": 0.1')
    ),
    "plan.json, by its hash in audit.json": lambda folder: edit(
        folder / "plan.json", lambda line: line.replace("lms=5", "lms=6")
    ),
    "what was asked, by the plan": lambda folder: edit(
        folder / "plan.json", lambda line: line.replace('"prefix_length": 6', '"prefix_length": 7')
    ),
    "passages.json, by the plan": lambda folder: edit(
        folder / "passages.json", lambda line: line.replace('"seed": 0', '"seed": 7')
    ),
    "report": lambda folder: (folder / "report" / "audit.json").write_text("[]"),
    "plan and audit.json": lambda folder: (folder / "plan.json").write_text("{"),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_who_changes_a_file_and_its_hash_is_found_by_computing_again(what, copy):
    root = verify(copy).root
    FORGERIES[what](copy)
    assert write_sums(copy) != root
    assert states(copy)[what] == "changed"


def test_texts_and_weights_of_another_content_are_found(audited, copy, tmp_path):
    for name, what in (
        ("training.txt", "texts"),
        ("unseen.txt", "controls and tokenizer"),
        ("model/config.json", "weights of the model"),
    ):
        content = (audited / name).read_bytes()
        (audited / name).write_bytes(content + b" ")
        assert states(copy)[what] == "changed"
        (audited / name).write_bytes(content)


@pytest.mark.parametrize("name", ["mine.txt", "report/conclusion.html", "unfinished/page.html"])
def test_what_is_put_beside_the_files_of_an_audit_is_found(copy, name):
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("of somebody else")
    assert states(copy)["no other files in the folder"] == "changed"
    (copy / name).unlink()
    (copy / name).symlink_to(copy / "report" / "index.html")
    assert states(copy)["no other files in the folder"] == "changed"


def test_a_shorter_list_of_hashes_or_one_of_other_folders_is_found(copy):
    sums = (copy / "SHA256SUMS").read_text()
    (copy / "SHA256SUMS").write_text("")
    assert verify(copy).changed
    for line in (
        f"{'0' * 64}  ../x\n",
        f"{'0' * 64}  /etc/hostname\n",
        sums.splitlines()[0] + "\n",
    ):
        (copy / "SHA256SUMS").write_text(sums + line)
        with pytest.raises(ValueError, match="is not a SHA-256 and the name of another file"):
            verify(copy)


def test_line_ends_of_other_scripts_in_the_text_are_no_ends_of_answers(
    tiny_checkpoint, tmp_path, audited
):
    for name in ("training.txt", "unseen.txt"):
        text = (audited / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join(line.replace(". ", ".\u2028") for line in text))
    audit(spec_of(tmp_path, tiny_checkpoint))
    assert not verify(tmp_path / "audit").changed


def test_a_changed_plan_is_another_audit(audited, copy):
    def again(**changes):
        return audit(spec_of(audited, audited / "model", output_dir=copy, **changes))

    plan = (copy / "plan.json").read_bytes()
    for changes, what in (
        ({"limits": "lms=6"}, 'limits was "lms=5", is "lms=6"'),
        ({"max_new_tokens": 9}, "rules.max_new_tokens was 8, is 9"),
        (
            {"attacks": ("greedy", "truncated")},
            r"the attack truncated \(prompts of tokens 3 to 6\) was not there before\. Name",
        ),
        ({"prefix_lengths": (7,)}, "of the attack greedy, prefix_length was 6, is 7; rules"),
    ):
        with pytest.raises(ValueError, match=f"is the audit of another plan: {what}"):
            again(**changes)
    assert (copy / "plan.json").read_bytes() == plan
    assert not verify(copy).changed
    assert again().summary["plan"] == file_sha256(copy / "plan.json")
    assert not verify(copy).changed, "the same plan is asked again"
    earlier, _ = sorted((copy / "evaluation").iterdir())
    assert states(copy)[f"answers in evaluation/{earlier.name}"] == "not checked"
    assert again(limits="lms=6", overwrite=True).summary["limits"][0]["limit"] == 6
    assert not verify(copy).changed


def test_attacks_that_differ_are_named():
    def attack(name, length, offset=0, **generation):
        return {
            "name": name,
            "prefix_length": length,
            "offset": offset,
            "prompt_noise": 0.0,
            "generation": generation,
        }

    greedy = [attack("greedy", length) for length in (32, 50)]
    sampling = attack("sampling", 50, num_samples=10, temperature=1.0)
    more = attack("sampling", 50, num_samples=20, temperature=1.0)
    offset = attack("offset", 32, 64)
    assert _changed_attacks([*greedy, sampling], [*greedy, sampling]) == []
    assert _changed_attacks([*greedy, sampling], [sampling, *greedy]) == [
        "the attacks are now in this order: sampling, greedy"
    ]
    assert _changed_attacks([*greedy, sampling], [greedy[0], more, offset]) == [
        "the attack greedy (prompts of tokens 0 to 50) is not there any more",
        "of the attack sampling, generation.num_samples was 10, is 20",
        "the attack offset (prompts of tokens 64 to 96) was not there before",
    ]


def test_the_plan_is_there_before_the_first_question(audited, tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tfidf_tune.tasks.evaluation.evaluate", killed)
    spec = spec_of(audited, audited / "model", output_dir=tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        audit(spec)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["attacks"][0]["name"] == "greedy"
    assert plan["limits"] == "lms=5"
    assert not (tmp_path / "out" / "SHA256SUMS").exists()
    # Nothing was answered: another plan may take its place.
    spec = spec_of(audited, audited / "model", output_dir=tmp_path / "out", limits="lms=4")
    with pytest.raises(KeyboardInterrupt):
        audit(spec)
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["limits"] == "lms=4"


def test_a_plan_has_no_secret_and_nothing_of_the_connection():
    given = {
        "model": "m",
        "tokenizer": "t",
        "timeout": 6.0,
        "token": "hf_abc",
        "hub_api_key": "sk-1",
    }
    assert _deciding(given) == {
        "model": "m",
        "tokenizer": "t",
        "token": "(not recorded)",
        "hub_api_key": "(not recorded)",
    }


def test_a_tokenizer_in_a_folder_of_its_own_is_no_part_of_the_model(audited, tmp_path):
    tokenizer = shutil.copytree(audited / "model", tmp_path / "tokenizer")
    for name in ("model.safetensors", "config.json"):
        (tokenizer / name).unlink()
    out = tmp_path / "audit"
    result = audit(spec_of(audited, audited / "model", tokenizer=str(tokenizer), output_dir=out))
    assert {Path(name).parent for name in result.summary["inputs"]["model"]} == {audited / "model"}
    assert not verify(out).changed
