"""How an audit reads text: as the run that wrote the model did."""

import json

import pytest

from tfidf_tune.audit import AuditSpec
from tfidf_tune.audit._plan import resolve
from tfidf_tune.passages import ProbeSpec

CONFIG = (
    "model: {_component_: x}\nloss: {_component_: x}\ncheckpointer: {_component_: x}\ndataset: "
)
DATA_SETS = {
    "{_component_: tfidf_tune.data.text_blocks_dataset, sample_by: paragraph}": "paragraph",
    "{_component_: tfidf_tune.data.text_blocks_dataset}": "line",
    "[{_component_: a, sample_by: line}, {_component_: b}]": "line",
    "[{_component_: a, sample_by: document}, {_component_: b}]": "document",  # they differ
    "{_component_: a, sample_by: chapter}": "document",
}


@pytest.mark.parametrize(("dataset", "expected"), DATA_SETS.items())
def test_what_a_document_is_follows_from_the_run_unless_it_is_named(dataset, expected, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint_100pct"
    checkpoint.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(CONFIG + dataset)

    def read_by(model, **changes):
        spec = AuditSpec(
            model=str(model),
            passages=ProbeSpec(sources=("a.txt",), **changes),
            output_dir=tmp_path / "out",
        )
        return resolve(spec).chosen.document_is

    assert read_by(checkpoint) == expected
    assert read_by(checkpoint, sample_by="line") == "line"
    (tmp_path / "elsewhere").mkdir()
    assert read_by(tmp_path / "elsewhere") == "document"


def test_the_base_of_an_adapter_is_of_the_revision_that_the_adapter_names(tmp_path):
    named = {"base_model_name_or_path": "org/base", "revision": "v2"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))

    def model_args(**changes):
        passages = ProbeSpec(sources=("a.txt",))
        spec = AuditSpec(
            model=str(tmp_path), passages=passages, output_dir=tmp_path / "out", **changes
        )
        return resolve(spec).model_args

    adapter = {"peft": str(tmp_path)}
    assert model_args() == {**adapter, "pretrained": "org/base", "revision": "v2"}
    assert model_args(model_args={"revision": "v3"})["revision"] == "v3"
    assert model_args(base="org/other") == {**adapter, "pretrained": "org/other"}
