"""Models of the Hugging Face hub, in a cache of this machine: what is hashed is what is loaded."""

import json
import shutil

import huggingface_hub
import peft
import pytest
from helpers.fakes import tiny_audit
from huggingface_hub.errors import LocalEntryNotFoundError

from tfidf_tune._files import file_sha256
from tfidf_tune.audit import audit, verify
from tfidf_tune.audit._model_files import files_of, with_commits
from tfidf_tune.audit._plan import resolve
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results

pytestmark = pytest.mark.usefixtures("quick_reports")

FIRST = "1" * 40
SECOND = "2" * 40
CACHE = "huggingface_hub.constants.HF_HUB_CACHE"


class Cache:
    """A folder as huggingface_hub keeps it: links to files that are named by their content."""

    def __init__(self, folder):
        self.folder = folder

    def put(self, repository, commit, files, revision="main"):
        """Add a commit with the files of a folder, and name it."""
        of_repository = self.folder / f"models--{repository.replace('/', '--')}"
        snapshot = of_repository / "snapshots" / commit
        for folder in (snapshot, of_repository / "blobs", of_repository / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        for file in files.iterdir():
            blob = of_repository / "blobs" / file_sha256(file)
            shutil.copy(file, blob)
            (snapshot / file.name).symlink_to(blob)
        (of_repository / "refs" / revision).write_text(commit)
        return snapshot


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(CACHE, str(tmp_path / "hub"))
    return Cache(tmp_path / "hub")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    tiny_audit.write_texts(folder)
    return folder


def weights_of(folder):
    checks = {check.what: check for check in verify(folder).checks}
    return {
        role: checks[f"weights of the {role}"]
        for role in ("model", "reference")
        if f"weights of the {role}" in checks
    }


def test_a_model_of_the_hub_is_loaded_by_the_commit_whose_files_are_hashed(
    cache, texts, tiny_checkpoint, tmp_path, monkeypatch
):
    first = cache.put("org/tiny", FIRST, tiny_checkpoint)
    (first / "README.md").write_text("not loaded")
    broken = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"")

    def upload(note):
        # Between plan and loading, main becomes a commit that cannot be loaded.
        if note.startswith("Plan, before the first question"):
            cache.put("org/tiny", SECOND, broken)

    out = tmp_path / "audit"
    spec = tiny_audit.spec_of(texts, model="org/tiny", output_dir=out)
    result = audit(spec, upload)
    plan = json.loads((out / "plan.json").read_text())
    assert plan["model"]["commits"] == {"org/tiny": FIRST}
    expected = {
        f"org/tiny/{file.name}": file_sha256(file)
        for file in tiny_checkpoint.iterdir()
        if file.suffix in (".json", ".safetensors")
    }
    assert "org/tiny/model.safetensors" in expected
    assert plan["model"]["files"] == result.summary["inputs"]["model"] == expected
    assert "Model: org/tiny (" in result.report.subject

    assert weights_of(out)["model"].state == "same"
    monkeypatch.setattr(CACHE, str(tmp_path / "elsewhere"))
    elsewhere = weights_of(out)["model"]
    assert (elsewhere.state, elsewhere.detail[:30]) == (
        "not checked",
        "not here: org/tiny/config.json",
    )
    monkeypatch.setattr(CACHE, str(cache.folder))

    # Another commit is another plan.
    with pytest.raises(ValueError, match=f'model.commits.org/tiny was "{FIRST}", is "{SECOND}"'):
        audit(spec)
    with (first / "model.safetensors").resolve().open("ab") as file:
        file.write(b" ")
    assert weights_of(out)["model"].state == "changed"


def test_an_adapter_and_a_reference_of_the_hub_are_hashed(cache, texts, tiny_checkpoint, tmp_path):
    adapter = peft.get_peft_model(
        load_model(tiny_checkpoint), peft.LoraConfig(target_modules=["q_proj"], r=2)
    )
    adapter.save_pretrained(tmp_path / "adapter")
    cache.put("org/tiny", FIRST, tiny_checkpoint)
    cache.put("org/adapter", SECOND, tmp_path / "adapter")
    out = tmp_path / "audit"
    spec = tiny_audit.spec_of(
        texts,
        model="org/tiny",
        model_args={"peft": "org/adapter"},
        reference="org/tiny",
        output_dir=out,
    )
    audit(spec)
    plan = json.loads((out / "plan.json").read_text())
    assert plan["model"]["commits"] == {"org/tiny": FIRST, "org/adapter": SECOND}
    assert plan["reference"]["commits"] == {"org/tiny": FIRST}
    assert plan["model"]["files"].keys() - plan["reference"]["files"].keys() == {
        "org/adapter/adapter_config.json",
        "org/adapter/adapter_model.safetensors",
    }
    assert {check.state for check in weights_of(out).values()} == {"same"}
    # The reference gave likelihoods, too, for which it is loaded by another way.
    assert "reference_nll" in set(import_results([out]).scores["metric"])


def test_a_revision_is_honoured_and_a_model_without_weights_has_no_hashes(
    cache, texts, tiny_checkpoint, tmp_path, monkeypatch
):
    def files(**changes):
        plan = with_commits(resolve(tiny_audit.spec_of(texts, **{"model": "org/tiny"} | changes)))
        return files_of(plan.model_args)

    with pytest.raises(FileNotFoundError, match="'org/tiny' is not on this machine"):
        files()
    cache.put("org/tiny", FIRST, tiny_checkpoint)
    config = tmp_path / "config"
    config.mkdir()
    shutil.copy(tiny_checkpoint / "config.json", config)
    cache.put("org/tiny", SECOND, config, revision="v2")
    assert files().commits == {"org/tiny": FIRST}
    assert files(model_args={"revision": "v2"}) == ({}, {"org/tiny": SECOND})
    assert files(model_args={"subfolder": "inner"}) == ({}, {})
    # An adapter's hashes alone would say nothing about its base.
    adapter = {"peft": str(tiny_checkpoint), "revision": "v2"}
    assert files(model_args=adapter) == ({}, {"org/tiny": SECOND})

    # Where the repository has more files than were downloaded, those here are enough to load.
    expected = files()

    def incomplete(*_, **__):
        raise LocalEntryNotFoundError("some files are missing")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    assert files() == expected


def test_files_of_the_base_are_hashed_once_for_model_and_reference(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    model_args = {"pretrained": str(tmp_path)}
    first = files_of(model_args)
    assert len(first.hashes) == 2
    monkeypatch.delattr("tfidf_tune._files.file_sha256")
    assert files_of(model_args, known=first.hashes) == first
