"""Targets and controls of a text that a coin divided: chosen by one function, whatever the side."""

import json
import random

import pytest
from helpers.fakes.data import random_text, write_rows

from tfidf_tune.audit import AuditSpec, audit, verify
from tfidf_tune.commands.audit import main as audit_command
from tfidf_tune.commands.data import main as data_command
from tfidf_tune.corpus import read_holdout
from tfidf_tune.passages import ProbeSpec, make_probe, read_probe_file
from tfidf_tune.passages.of_holdout import choose_by_coin

LENGTH = 32
SHARED = 16  # tokens in a row: half of a passage
FRAME = random_text(900, 40)


def texts_of(seed=0, number=240):
    """Documents of their own; every tenth has two copies, every fifth a frame that others have."""
    rows = []
    for document in range(number):
        text = random_text(10_000 * seed + document, 90)
        if document % 5 == 0:
            words = text.split()
            text = " ".join([*words[:20], FRAME, *words[20:]])
        rows += [text] * (3 if document % 10 == 1 else 1)
    random.Random(seed).shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    folder = tmp_path_factory.mktemp("divided")
    write_rows(folder / "texts.jsonl", texts_of())
    data_command(["holdout", str(folder / "texts.jsonl"), str(folder / "out"), "--share", "0.3"])
    return folder / "out"


def spec_of(folder, **changes):
    fields = {"num_targets": 60, "num_controls": 60, "block_size": LENGTH, "allow_fewer": True}
    return ProbeSpec(sources=(), holdout=str(folder / "holdout.json"), **fields | changes)


def documents_of(folder, tokenizer):
    """Side, group, copies and ids of each document."""
    holdout = read_holdout(folder)
    found = []
    for side in ("train", "held_out"):
        for row, group in holdout.rows(side):
            ids = tokenizer.encode(row.columns["text"], add_bos=False, add_eos=False)
            found.append((side, group.name, group.documents, ids, row.place))
    return found


def runs(ids):
    return {tuple(ids[at : at + SHARED]) for at in range(len(ids) - SHARED + 1)}


def contains(ids, part):
    return any(ids[at : at + len(part)] == part for at in range(len(ids) - len(part) + 1))


def test_each_passage_is_of_its_side_and_shares_no_run_with_another_group(divided, tokenizer):
    documents = documents_of(divided, tokenizer)
    chosen = choose_by_coin(tokenizer, spec_of(divided))
    assert len(chosen.targets) == len(chosen.controls) >= 40
    for side, drafts in (("train", chosen.targets), ("held_out", chosen.controls)):
        for draft in drafts:
            ids = draft.token_ids.tolist()
            owners = [one for one in documents if contains(one[3], ids)]
            assert {one[0] for one in owners} == {side}
            assert len({one[1] for one in owners}) == 1
            (group,) = {one[1] for one in owners}
            assert draft.source in {one[4] for one in owners}
            if side == "train":
                assert draft.fields == {"num_injections": owners[0][2], "document": 0}
            else:
                assert draft.fields == {"document": 0}
            others = [one[3] for one in documents if one[1] != group]
            assert all(runs(ids).isdisjoint(runs(other)) for other in others)
    # As many of each number of copies on both sides.
    copies = {one[4]: one[2] for one in documents}
    tiers = [
        sorted(copies[one.source].bit_length() for one in drafts)
        for drafts in (chosen.targets, chosen.controls)
    ]
    assert tiers[0] == tiers[1]
    assert {1, 2} == {*tiers[0]}
    # The frame is in no passage, and some candidates had it.
    assert chosen.num_refused > 0
    assert (chosen.num_documents, chosen.num_tokens) == (
        len(documents),
        sum(len(one[3]) for one in documents),
    )


def test_whether_a_passage_can_be_chosen_does_not_depend_on_the_side(divided, tokenizer, tmp_path):
    """Another seed of the coin: what is on both sides' lists is the same passage of its document."""
    source = divided.parent / "texts.jsonl"
    found = {}
    for seed in ("0", "1"):
        out = tmp_path / seed
        data_command(["holdout", str(source), str(out), "--share", "0.5", "--seed", seed])
        chosen = choose_by_coin(tokenizer, spec_of(out, num_targets=10_000, num_controls=10_000))
        for draft in [*chosen.targets, *chosen.controls]:
            found.setdefault(draft.token_ids.tobytes(), set()).add(seed)
    on_both = [seeds for seeds in found.values() if seeds == {"0", "1"}]
    # All but those for which the other side had no partner in their tier.
    assert len(on_both) > 0.8 * len(found)


def test_small_batches_give_the_same(divided, tokenizer, monkeypatch):
    whole = make_probe(tokenizer, spec_of(divided)).passages
    monkeypatch.setattr("tfidf_tune.passages.of_holdout._BATCH_TOKENS", 2000)
    assert make_probe(tokenizer, spec_of(divided)).passages == whole
    assert [one.kind for one in whole[:1]] == ["target"]
    other = make_probe(tokenizer, spec_of(divided, seed=1, num_targets=20, num_controls=20))
    assert {one.text for one in other.passages} != {one.text for one in whole}


def test_what_cannot_be_chosen_is_refused(divided, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"of 4000 tokens can be taken of each side .* lower --bl"):
        choose_by_coin(tokenizer, spec_of(divided, block_size=4000))
    with pytest.raises(ValueError, match="name no other text and no --controls beside --holdout"):
        ProbeSpec(sources=("a.txt",), holdout="x")
    chats = [
        {"prompt": f"say {number}", "completion": random_text(number, 30)} for number in range(60)
    ]
    write_rows(tmp_path / "chats.jsonl", chats)
    data_command(
        ["holdout", str(tmp_path / "chats.jsonl"), str(tmp_path / "out"), "--share", "0.5"]
    )
    with pytest.raises(ValueError, match="divides conversations or prompts, of which passages"):
        choose_by_coin(tokenizer, spec_of(tmp_path / "out"))


def audit_of(divided, model, out):
    audit_command(
        [
            str(model),
            "--holdout",
            str(divided),
            "--num-targets",
            "12",
            "--num-controls",
            "12",
            "--block-size",
            str(LENGTH),
            "--prefix-lengths",
            "8",
            "--max-new-tokens",
            "8",
            "--accept-unproven",
            "--output-dir",
            str(out),
        ]
    )


@pytest.mark.usefixtures("quick_reports")
def test_documents_without_a_coin_are_named_and_in_no_passage(tiny_checkpoint, tmp_path, capsys):
    rows = texts_of()
    write_rows(tmp_path / "texts.jsonl", rows)
    arguments = ["--share", "0.3", "--largest-group", "2"]
    data_command(["holdout", str(tmp_path / "texts.jsonl"), str(tmp_path / "divided"), *arguments])
    capsys.readouterr()
    out = tmp_path / "audit"
    said = (
        "Left out: 72 documents in 24 groups of more than 2 near copies were trained on without a "
        "coin"
    )
    for _ in range(2):  # also where the passages are those of an earlier audit
        audit_of(tmp_path / "divided", tiny_checkpoint, out)
        assert said in " ".join(capsys.readouterr().out.split())
    assert said in " ".join((out / "report" / "report.md").read_text().split())
    summary = json.loads((out / "report" / "audit.json").read_text())
    expected = {"documents": 72, "groups": 24, "largest_group": 2}
    assert summary["inputs"]["without_coin"] == expected
    assert not verify(out).changed
    copied = {text for text in rows if rows.count(text) == 3}
    for passage in read_probe_file(out / "probe.jsonl"):
        assert not any(passage.text.strip() in text for text in copied)


@pytest.mark.usefixtures("quick_reports")
def test_an_audit_by_a_manifest_is_verified_and_a_changed_side_is_found(
    divided, tiny_checkpoint, tmp_path, capsys
):
    out = tmp_path / "audit"
    audit_of(divided, tiny_checkpoint, out)
    printed = capsys.readouterr().out
    assert "divided by a coin before training" in printed
    assert "Left out" not in printed
    assert not verify(out).changed
    summary = json.loads((out / "report" / "audit.json").read_text())
    assert (summary["num_targets"], summary["num_controls"]) == (12, 12)
    assert summary["inputs"]["holdout"] == str(divided / "holdout.json")
    page = (out / "report" / "report.md").read_text()
    assert "by a coin" in page
    assert "Left out" not in page
    file = next((divided / "train").glob("*.gz"))
    content = file.read_bytes()
    file.write_bytes(content + b"\n")
    try:
        states = {check.what: check.state for check in verify(out).checks}
        assert states["controls and tokenizer"] != "same"
    finally:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="no source is given"):
        audit_command([str(tiny_checkpoint), "--output-dir", str(out)])
    spec = AuditSpec(
        model=str(tiny_checkpoint), passages=spec_of(divided), prefix_lengths=(8,), output_dir=out
    )
    with pytest.raises(ValueError, match="what they follow from has changed"):
        audit(spec)
