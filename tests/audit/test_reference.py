"""What a model recites because of a training: the model before it is asked the same."""

import json
import math
import shutil

import numpy as np
import peft
import pytest
import torch
from helpers.fakes.openai_server import serving
from helpers.fakes.tiny_run import write_documents
from scipy import stats

from tfidf_tune.audit import AuditSpec, ServerSpec, audit, verify
from tfidf_tune.audit._plan import resolve
from tfidf_tune.audit._reference import described
from tfidf_tune.data import embedded_documents, hf_tokenizer
from tfidf_tune.passages import ProbeSpec
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results
from tfidf_tune.results.intervals import auc_difference
from tfidf_tune.tasks._transformers import TokenExactHFLM

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory):
    """Texts, a base, and an adapter that changes what it writes."""
    folder = tmp_path_factory.mktemp("reference")
    write_documents(folder / "training.txt")
    unseen = embedded_documents("docstrings_validation")[:60]
    (folder / "unseen.txt").write_text("\n".join(text.replace("\n", " ") for text in unseen))
    shutil.copytree(tiny_checkpoint, folder / "base")
    save_adapter(folder, "adapter")
    return folder


def save_adapter(folder, name, **changes):
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **changes)
    model = peft.get_peft_model(load_model(folder / "base"), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder / name)
    hf_tokenizer(str(folder / "base")).save_pretrained(folder / name)
    file = folder / name / "adapter_config.json"
    written = json.loads(file.read_text())
    written["base_model_name_or_path"] = str(folder / "base")
    file.write_text(json.dumps(written))
    return folder / name


def spec_of(folder, out, **changes):
    passages = ProbeSpec(
        (str(folder / "training.txt"),),
        controls_source=str(folder / "unseen.txt"),
        num_targets=12,
        num_controls=12,
        block_size=24,
        sample_by="line",
    )
    arguments = {
        "model": str(folder / "adapter"),
        "passages": passages,
        "prefix_lengths": (6,),
        "max_new_tokens": 8,
        "output_dir": out,
        "accept_unproven": True,
    }
    return AuditSpec(**arguments | changes)


def checkpoints_of(folder):
    """The scores and continuations of both, by whether it is the reference."""
    results = import_results([folder])
    found = {}
    for number, checkpoint in enumerate(results.checkpoints):
        rows = results.scores[results.scores["checkpoint"] == number]
        nlls = rows[rows["metric"] == "passage_nll"].set_index("unit")["value"]
        answers = {sample.passage_id: sample.generated_ids for sample, _ in checkpoint.samples}
        found[checkpoint.is_start] = (answers, nlls, rows)
    return found


def test_an_adapter_is_loaded_once_and_switched_off_for_its_reference(
    folder, tmp_path, monkeypatch
):
    loaded = []
    init = TokenExactHFLM.__init__

    def counted(self, *arguments, **options):
        loaded.append(arguments)
        init(self, *arguments, **options)

    monkeypatch.setattr(TokenExactHFLM, "__init__", counted)
    result = audit(spec_of(folder, tmp_path / "switched", reference="base"))
    assert len(loaded) == 1
    named = audit(spec_of(folder, tmp_path / "named", reference=str(folder / "base")))
    alone = audit(spec_of(folder, tmp_path / "alone", model=str(folder / "base"), reference=None))

    # The base, switched off or loaded, or audited by itself, answers the same.
    switched = checkpoints_of(tmp_path / "switched")
    of_named = checkpoints_of(tmp_path / "named")
    ((answers, nlls, _),) = checkpoints_of(tmp_path / "alone").values()
    for found in (switched, of_named):
        assert found[True][0] == answers
        np.testing.assert_allclose(found[True][1].sort_index(), nlls.sort_index(), rtol=1e-5)
        assert found[False][0] != answers
    assert switched[False][0] == of_named[False][0]

    # Membership against the reference is the same, too, by the same pass.
    for metric in ("reference_nll", "wbc", "error_zone"):
        values = [
            found[False][2].set_index(["metric", "unit"])["value"].loc[metric].sort_index()
            for found in (switched, of_named)
        ]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)
    reference_nlls = switched[False][2].set_index(["metric", "unit"])["value"].loc["reference_nll"]
    np.testing.assert_allclose(reference_nlls.sort_index(), nlls.sort_index(), rtol=1e-5)

    # The table before and after, by hand.
    table = next(one for one in result.report.tables if one.name == "before_and_after")
    rows = table.frame.set_index("Measure")
    targets = {
        is_start: found[2][(found[2]["metric"] == "lms") & (found[2]["kind"] == "target")]["value"]
        for is_start, found in switched.items()
    }
    lms = rows.loc["LMS of targets (tokens)"]
    assert lms["Before"] == pytest.approx(targets[True].mean())
    assert lms["After"] == pytest.approx(targets[False].mean())
    assert lms["95 % from"] <= lms["Difference"] <= lms["95 % to"]
    is_target = nlls.index.str.startswith("target")
    expected = stats.mannwhitneyu(-nlls[is_target], -nlls[~is_target]).statistic / 12**2
    auc = rows.loc["Membership AUC, by the loss"]
    assert auc["Before"] == pytest.approx(expected)
    (_, nlls_after, _) = switched[False]
    is_target = nlls_after.index.str.startswith("target")
    statistic = stats.mannwhitneyu(-nlls_after[is_target], -nlls_after[~is_target]).statistic
    assert auc["After"] == pytest.approx(statistic / 12**2)
    assert "Before" in next(one for one in result.report.tables if one.name == "leaks").frame
    assert named.summary["measures"]["lms"] == result.summary["measures"]["lms"]
    assert alone.summary["num_targets"] == 12
    assert not verify(tmp_path / "switched").changed
    assert not verify(tmp_path / "named").changed


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"bias": "all"}, r"trained biases \(bias=all\)"),
        ({"init_lora_weights": "pissa"}, r"another start of its base \(init_lora_weights=pissa\)"),
        ({"init_lora_weights": "olora"}, r"another start of its base \(init_lora_weights=olora\)"),
        ({"init_lora_weights": "loftq"}, r"another start of its base \(init_lora_weights=loftq\)"),
        (
            {"trainable_token_indices": [1]},
            r"trained rows of the embedding \(trainable_token_indices\)",
        ),
    ],
)
def test_an_adapter_that_changes_its_base_cannot_be_switched_off(folder, tmp_path, changes, what):
    adapter = shutil.copytree(folder / "adapter", tmp_path / "adapter")
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=f"{what}, so that the model without it is not the model"):
        resolve(spec_of(folder, tmp_path / "out", model=str(adapter), reference="base"))


def test_an_embedding_with_other_rows_changes_the_base_and_modules_beside_it_do_not(
    folder, tmp_path
):
    def resized(name, options, **changes):
        model = load_model(folder / "base")
        num_tokens = model.get_input_embeddings().weight.shape[0]
        model.resize_token_embeddings(num_tokens + 8, mean_resizing=False)
        config = peft.LoraConfig(target_modules=["q_proj"], r=2, **changes)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / name, **options)
        return spec_of(
            folder,
            tmp_path / "out",
            model=str(tmp_path / name),
            base=str(folder / "base"),
            reference="base",
        )

    whole = resized("whole", {"save_embedding_layers": True})
    saved = resized(
        "saved",
        {"save_embedding_layers": False},
        modules_to_save=["embed_tokens", "lm_head"],
        ensure_weight_tying=True,
    )
    beside = save_adapter(folder, tmp_path / "beside", modules_to_save=["norm"])
    with pytest.raises(ValueError, match="has weights of its base"):
        resolve(whole)
    with pytest.raises(ValueError, match=r"has a resized embedding \([\d,]+ tokens, its base has"):
        resolve(saved)
    plan = resolve(spec_of(folder, tmp_path / "out", model=str(beside), reference="base"))
    assert plan.reference.kind == "base"


def test_a_reference_that_cannot_be_asked_is_refused_before_the_model_is_loaded(folder, tmp_path):
    server = ServerSpec(base_url="http://localhost:1/v1")
    of_server = {"server": server, "tokenizer": str(folder / "base"), "model": "m"}
    for changes, what in (
        (
            {"model": str(folder / "base"), "reference": "base"},
            "and .*base is none: name the model",
        ),
        ({"reference": str(tmp_path / "none")}, "no folder"),
        ({"reference": "m", "reference_url": "http://x/v1"}, "is for a model behind a server"),
        ({**of_server, "reference": "base"}, "m is behind a server: name .* --reference-url URL"),
        ({**of_server, "reference": "m", "reference_url": "localhost"}, "localhost"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=what):
            resolve(spec_of(folder, tmp_path / "out", **changes))


def test_a_quantized_base_is_named_so(folder, tmp_path):
    spec = spec_of(folder, tmp_path / "out", reference="base", model_args={"load_in_4bit": True})
    plan = resolve(spec)
    said = described(plan.reference, plan.model_args)
    assert said["folder"] == f"{folder / 'base'}, at the same quantization"


def test_the_reference_can_be_behind_another_server(folder, tiny_checkpoint, tmp_path):
    with serving(folder / "adapter") as (_, url), serving(folder / "base") as (_, base_url):
        server = ServerSpec(base_url=url, max_retries=0)
        result = audit(
            spec_of(
                folder,
                tmp_path / "served",
                model="after",
                server=server,
                tokenizer=str(folder / "base"),
                reference="before",
                reference_url=base_url,
            )
        )
    table = next(one for one in result.report.tables if one.name == "before_and_after")
    found = checkpoints_of(tmp_path / "served")
    assert found[True][0] != found[False][0]
    assert len(table.frame) == 4  # this server gives no likelihoods
    plan = json.loads((tmp_path / "served" / "plan.json").read_text())
    assert plan["reference"]["url"] == base_url


def test_the_difference_of_two_aucs_is_paired_by_passage():
    rng = np.random.default_rng(0)
    members = rng.normal(1, 1, 40)
    others = rng.normal(0, 1, 30)
    aucs, interval = auc_difference((members, others), (members, others))
    assert aucs[0] == aucs[1]
    assert (interval.low, interval.high) == (0, 0)
    moved = members + rng.normal(0.5, 0.2, 40)
    aucs, interval = auc_difference((members, others), (moved, others))
    expected = [stats.mannwhitneyu(one, others).statistic / (40 * 30) for one in (members, moved)]
    assert aucs == pytest.approx(expected)
    # A slow bootstrap of the same.
    draws = []
    for _ in range(1000):
        first = rng.integers(0, 40, 40)
        second = rng.integers(0, 30, 30)
        pairs = [(one[first], others[second]) for one in (members, moved)]
        before, after = (np.mean(a[:, None] > b[None, :]) for a, b in pairs)
        draws.append(after - before)
    low, high = np.quantile(draws, [0.025, 0.975])
    # The standard error of a quantile of 1,000 draws is below a tenth of the interval.
    margin = 0.2 * (high - low)
    assert math.isclose(interval.low, low, abs_tol=margin)
    assert math.isclose(interval.high, high, abs_tol=margin)
