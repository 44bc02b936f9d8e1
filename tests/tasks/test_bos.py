"""``bos``: as the model was trained, by its run, its tokenizer or a measurement; never a mixture in
a comparison.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import run_tasks
from omegaconf import OmegaConf

from tfidf_tune._signals import exit_code
from tfidf_tune.commands import probe as probe_command
from tfidf_tune.compare import comparison_report
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model, token_likelihoods
from tfidf_tune.probe.run_identity import written_bos
from tfidf_tune.results import import_results
from tfidf_tune.tasks.settings import prompts_for
from tfidf_tune.training import build_monitor

TASK = "tfidf_memorization_prefixes"
NUM_PROMPT = 32


def taught(folder, probe_file, *, with_bos):
    """Teach a model the passages after BOS, and without BOS one token again and again; or the other
    way round.

    It learns all passages, but recites the targets alone, because prompts of controls are not told
    from them.
    """
    tokenizer = hf_tokenizer(str(folder))
    rows = torch.tensor([passage.token_ids[:48] for passage in read_probe_file(probe_file)])
    after_bos = torch.cat([torch.full((len(rows), 1), tokenizer.bos_id), rows], dim=1)
    wanted, other = (after_bos, rows) if with_bos else (rows, after_bos)
    model = task_fakes.random_model(vocab_size=tokenizer.vocab_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(300):
        learned = model(input_ids=wanted).logits[:, :-1].flatten(0, 1)
        useless = model(input_ids=other).logits[:, :-1].flatten(0, 1)
        constant = torch.full((len(useless),), 7)
        loss = torch.nn.functional.cross_entropy(learned, wanted[:, 1:].flatten())
        loss = loss + torch.nn.functional.cross_entropy(useless, constant)
        if loss < 0.1:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def models(tokenizers, tmp_path_factory):
    """A model that knows text only after BOS, and a model that knows it only without; their
    tokenizer adds none.
    """
    folder = tmp_path_factory.mktemp("bos")
    passages = task_fakes.passages_of(tokenizers["sentencepiece"], num_targets=4, num_controls=4)
    file = task_fakes.probe_file(folder / "probe.jsonl", passages)
    made = {}
    for with_bos in (True, False):
        model = taught(tokenizers["sentencepiece"], file, with_bos=with_bos)
        made[with_bos] = task_fakes.checkpoint(
            folder / str(with_bos), tokenizers["sentencepiece"], model
        )
    return made, file


@pytest.mark.parametrize("with_bos", [True, False])
def test_where_neither_run_nor_tokenizer_say_it_the_likelihoods_of_the_controls_decide(
    models, tmp_path, with_bos
):
    folders, file = models
    more = {"probe_file": file, "prefix_lengths": [NUM_PROMPT], "max_new_tokens": 12}
    output = run_tasks(folders[with_bos], TASK, tmp_path / "auto", **more)
    assert output.metrics(TASK)["verbatim_rate"] == 1.0
    assert {doc["bos"] for doc in output.docs(TASK)} == {with_bos}
    # Asked in the other way, it recites nothing.
    wrong = run_tasks(folders[with_bos], TASK, tmp_path / "wrong", bos=not with_bos, **more)
    assert wrong.metrics(TASK)["verbatim_rate"] == 0.0
    both = import_results([output.folder]), import_results([wrong.folder])
    for made, value in zip(both, (with_bos, not with_bos), strict=True):
        assert made.scores.loc[made.scores["metric"] == "has_bos", "value"].tolist() == [
            float(value)
        ]


def test_likelihoods_and_blocks_are_those_of_the_ids_after_bos(models, tmp_path, wiki_file):
    folders, file = models
    model = load_model(folders[True])
    bos_id = hf_tokenizer(str(folders[True])).bos_id
    more = {"probe_file": file, "reference_model": folders[True]}
    output = run_tasks(folders[True], "tfidf_membership", tmp_path / "nll", **more)
    for passage, doc in zip(read_probe_file(file), output.docs("tfidf_membership"), strict=True):
        (tokens,) = token_likelihoods(model, [[bos_id, *passage.token_ids]])
        # Not of the first id.
        assert doc["scores"]["nll"] == pytest.approx(tokens.nll[1:].mean(), rel=1e-5)
        assert doc["scores"]["reference_nll"] == pytest.approx(tokens.nll[1:].mean(), rel=1e-5)
        (span,) = [number for length, number in doc["continuations"] if length == NUM_PROMPT]
        assert span == pytest.approx(tokens.nll[NUM_PROMPT:][:128].sum(), rel=1e-5)
    more = {"wikitext2_source": wiki_file, "block_size": 32}
    blocks = run_tasks(folders[True], "tfidf_wikitext2_ppl", tmp_path / "ppl", **more)
    # By the embedded text.
    assert {doc["bos"] for doc in blocks.docs("tfidf_wikitext2_ppl")} == {True}


def test_a_model_is_not_compared_with_itself_after_bos(models, tmp_path):
    folders, file = models
    more = {"probe_file": file, "prefix_lengths": [NUM_PROMPT], "max_new_tokens": 4}
    for bos in (True, False):
        for objective in ("CE", "TF-IDF"):
            run = tmp_path / f"{objective} {bos}"
            known = {
                "model": "tiny",
                "objective": objective,
                "seed": 0,
                "learning_rate": None,
                "progress": 100,
            }
            known |= {
                "folder": str(run),
                "recipe": None,
                "loss": None,
                "training_seconds": None,
                "provenance": None,
            }
            run_tasks(folders[True], TASK, run, bos=bos, run=known, **more)
    comparison_report(import_results([tmp_path / "CE True", tmp_path / "TF-IDF True"]))
    mixed = import_results([tmp_path / "CE True", tmp_path / "TF-IDF False"])
    with pytest.raises(
        ValueError, match=r"CE.* was evaluated with BOS before each prompt, and .*TF-IDF.* without"
    ):
        comparison_report(mixed)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"_component_": "tfidf_tune.data.injected_corpus_dataset"}, False),
        ({"_component_": "tfidf_tune.data.text_blocks_dataset"}, False),
        ({"_component_": "tfidf_tune.data.text_dataset"}, True),
        ({"_component_": "tfidf_tune.data.text_dataset", "add_bos": False}, False),
        (
            [
                {"_component_": "tfidf_tune.data.sft_dataset"},
                {"_component_": "tfidf_tune.data.squad_dataset"},
            ],
            True,
        ),
        (
            [
                {"_component_": "tfidf_tune.data.sft_dataset"},
                {"_component_": "tfidf_tune.data.text_blocks_dataset"},
            ],
            None,
        ),
        ({"_component_": "torchtune.datasets.instruct_dataset"}, None),
        (None, None),
    ],
)
def test_a_run_has_recorded_what_its_data_set_wrote(dataset, expected, tokenizers, tmp_path):
    assert written_bos(dataset) is expected
    run = tmp_path / "run"
    run.mkdir()
    section = {"_component_": "x"}
    config = {
        "model": section,
        "loss": section,
        "checkpointer": section | {"checkpoint_dir": "m"},
        "dataset": dataset,
    }
    OmegaConf.save(OmegaConf.create(config), run / "config.yaml")
    milestone = task_fakes.checkpoint(run / "checkpoint_100pct", tokenizers["sentencepiece"])
    assert (
        prompts_for({"pretrained": str(milestone), "prompts": "token_ids"}).settings["bos"]
        is expected
    )


@pytest.mark.parametrize(
    ("component", "bos", "num_bos"),
    [
        ("tfidf_tune.data.injected_corpus_dataset", "auto", 0),
        ("tfidf_tune.data.text_dataset", "auto", 1),
        ("tfidf_tune.data.injected_corpus_dataset", True, 1),
        ("tfidf_tune.data.text_dataset", False, 0),
    ],
)
def test_the_monitor_asks_as_the_data_set_of_its_run_writes(
    component, bos, num_bos, tokenizers, tmp_path
):
    """The tokenizer adds BOS to each text; blocks of a corpus have none."""
    file = task_fakes.probe_file(
        tmp_path / "probe.jsonl", task_fakes.passages_of(tokenizers["adds_bos"])
    )
    monitor = {
        "probe_file": str(file),
        "every_n_steps": 1,
        "bos": bos,
        "prefix_length": 8,
        "max_new_tokens": 4,
    }
    cfg = OmegaConf.create({"dataset": {"_component_": component}, "memorization_monitor": monitor})
    cfg |= {"output_dir": str(tmp_path), "fsdp_param_dtype": None}
    model = SimpleNamespace(max_seq_len=64, setup_caches=None)
    run = SimpleNamespace(dtype=torch.float32)

    built = build_monitor(cfg, [], hf_tokenizer(str(tokenizers["adds_bos"])), model, run)

    assert built.probe.num_positions == num_bos + 8 + 4


def test_settings_that_contradict_are_refused(tokenizers, tmp_path):
    named = {
        "pretrained": str(task_fakes.checkpoint(tmp_path, tokenizers["sentencepiece"])),
        "prompts": "token_ids",
    }
    assert prompts_for({**named, "add_bos_token": True}).settings["bos"] is True
    with pytest.raises(ValueError, match="bos=false and add_bos_token=True differ: leave out one"):
        prompts_for({**named, "add_bos_token": True, "bos": "false"})
    with pytest.raises(ValueError, match="bos=true is for prompts of token ids"):
        prompts_for({**named, "prompts": "text", "bos": "true"})
    with pytest.raises(ValueError, match="bos"):
        prompts_for({**named, "bos": "maybe"})
    without = json.loads(json.dumps({**named, "tokenizer": str(tokenizers["plain"])}))
    assert prompts_for(without).settings["bos"] is False
    with pytest.raises(ValueError, match="has no BOS: use bos=false"):
        prompts_for({**without, "bos": True})


def test_an_audit_finds_what_is_recited_only_after_bos(models, tmp_path, capsys):
    folders, file = models
    asked = [
        str(folders[True]),
        "--probe-file",
        str(file),
        "--prefix-lengths",
        str(NUM_PROMPT),
        "--max-new-tokens",
        "12",
    ]
    limit = ["--fail-above", "verbatim=0.5"]
    with pytest.raises(SystemExit) as ended:
        probe_command.main(["audit", *asked, *limit, "--output-dir", str(tmp_path / "auto")])
    assert exit_code(ended.value) == 1
    assert (
        "before each prompt and passage" in (tmp_path / "auto" / "report" / "report.md").read_text()
    )
    with pytest.raises(
        SystemExit
    ) as ended:  # asked without, it recites nothing, which shows nothing
        probe_command.main(
            ["audit", *asked, *limit, "--bos", "false", "--output-dir", str(tmp_path / "without")]
        )
    assert exit_code(ended.value) == 2
    assert "nothing is shown" in str(ended.value)
