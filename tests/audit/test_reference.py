"""What a model recites because of a training: the model before it is asked the same."""

import json
import math
import shutil

import numpy as np
import peft
import pytest
import torch
from helpers.fakes import tiny_audit
from helpers.fakes.openai_server import Host, serving
from scipy import stats

from tfidf_tune.audit import ServerSpec, audit, verify
from tfidf_tune.audit._plan import resolve
from tfidf_tune.audit._reference import described
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results
from tfidf_tune.results.intervals import auc_difference
from tfidf_tune.tasks._transformers import TokenExactHFLM
from tfidf_tune.tasks.server import (
    REQUESTS_PER_LIKELIHOOD_TEST,
    REQUESTS_PER_PROMPT_TEST,
    ServerLM,
)

pytestmark = pytest.mark.usefixtures("quick_reports")


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory):
    """Texts, a base, and an adapter that changes what it writes."""
    folder = tmp_path_factory.mktemp("reference")
    tiny_audit.write_texts(folder)
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
    """An audit of the adapter."""
    arguments = {"model": str(folder / "adapter"), "output_dir": out}
    return tiny_audit.spec_of(folder, **arguments | changes)


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
    auc = rows.loc["Membership AUC, by the loss: no finding, the texts differ"]
    assert auc["Before"] == pytest.approx(expected)
    (_, nlls_after, _) = switched[False]
    is_target = nlls_after.index.str.startswith("target")
    statistic = stats.mannwhitneyu(-nlls_after[is_target], -nlls_after[~is_target]).statistic
    assert auc["After"] == pytest.approx(statistic / 12**2)
    assert "Before" in next(one for one in result.report.tables if one.name == "leaks").frame
    assert named.summary["measures"]["lms"] == result.summary["measures"]["lms"]
    assert alone.summary["num_targets"] == 12
    verified = verify(tmp_path / "switched")
    assert not verified.changed
    # The answers of the reference are scored again, too.
    whats = [check.what for check in verified.checks]
    assert whats.count("24 scores of tfidf_memorization_prefixes, from the answers") == 2
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


def test_a_model_is_no_reference_of_itself(folder, tmp_path):
    def resolved(model, reference, **changes):
        spec = spec_of(folder, tmp_path / "out", model=str(model), reference=reference, **changes)
        return resolve(spec).reference

    (tmp_path / "link").symlink_to(folder / "base")
    url = "http://localhost:1/v1"
    of_server = {"server": ServerSpec(base_url=url), "tokenizer": str(folder / "base")}
    refused = (
        (folder / "base", str(folder / "base"), {}),
        (folder / "base", str(tmp_path / "link"), {}),
        (folder / "adapter", str(folder / "adapter"), {}),
        ("org/model", "org/model", {}),
        ("org/model", "org/model", {"model_args": {"revision": "main"}}),
        ("m", "m", {**of_server, "reference_url": f"{url}/"}),
    )
    for model, reference, changes in refused:
        with pytest.raises(ValueError, match="is the audited model itself, so that no passage"):
            resolved(model, reference, **changes)
    others = (
        (folder / "adapter", str(folder / "base"), {}),
        (folder / "base", str(folder / "base"), {"model_args": {"peft": str(folder / "adapter")}}),
        (folder / "base", str(folder / "base"), {"model_args": {"load_in_4bit": True}}),
        ("org/model", "org/before", {}),
        ("org/model", "org/model", {"model_args": {"revision": "v2"}}),
        ("m", "before", {**of_server, "reference_url": url}),
        ("m", "m", {**of_server, "reference_url": "http://localhost:2/v1"}),
        ("org/model", "org/model", of_server),
    )
    for model, reference, changes in others:
        assert resolved(model, reference, **changes).name == reference


def test_a_quantized_base_is_named_so(folder, tmp_path):
    spec = spec_of(folder, tmp_path / "out", reference="base", model_args={"load_in_4bit": True})
    plan = resolve(spec)
    said = described(plan.reference, plan.model_args)
    assert said["folder"] == f"{folder / 'base'}, at the same quantization"


def of_servers(folder, out, url, reference_url, **changes):
    """An audit of the model "after" at one server, with the model "before" at another."""
    of_server = {
        "model": "after",
        "server": ServerSpec(base_url=url, max_retries=0),
        "tokenizer": str(folder / "base"),
        "reference": "before",
        "reference_url": reference_url,
    }
    return spec_of(folder, out, **of_server | changes)


def test_the_reference_can_be_behind_another_server(folder, tiny_checkpoint, tmp_path):
    with serving(folder / "adapter") as (_, url), serving(folder / "base") as (_, base_url):
        result = audit(of_servers(folder, tmp_path / "served", url, base_url))
    table = next(one for one in result.report.tables if one.name == "before_and_after")
    found = checkpoints_of(tmp_path / "served")
    assert found[True][0] != found[False][0]
    assert len(table.frame) == 4  # this server gives no likelihoods
    plan = json.loads((tmp_path / "served" / "plan.json").read_text())
    assert plan["reference"]["url"] == base_url


class Templating(Host):
    """Puts a template of 21 tokens around each prompt."""

    def answer(self, path, payload):
        answer = super().answer(path, payload)
        answer["usage"]["prompt_tokens"] += 21
        return answer


def test_the_server_of_the_reference_is_tested_before_the_model_is_asked(folder, tmp_path):
    out = tmp_path / "out"
    templating = Templating(folder / "base")
    with serving(folder / "base") as (host, url), serving(None, templating) as (_, other_url):
        # As llama.cpp does, this server answers for each name by the model that it has.
        host.name = "only"
        same_url = url + "/"
        for reference_url, error, what in (
            ("http://127.0.0.1:1/v1", ConnectionError, r"127\.0\.0\.1:1/v1 did not answer"),
            (other_url, ValueError, f"{other_url} cannot answer for the reference: .* 21 tokens"),
            (same_url, ValueError, r"for after and for the reference before by one model \(only\)"),
        ):
            host.asked.clear()
            spec = of_servers(folder, out, url, reference_url, accept_unproven=False)
            with pytest.raises(error, match=what):
                audit(spec)
            assert len(host.asked) <= 2 * (REQUESTS_PER_PROMPT_TEST + REQUESTS_PER_LIKELIHOOD_TEST)
        # Of a server that names no model, only equal names tell.
        host.name = None
        with pytest.raises(ValueError, match="--reference after is the audited model itself"):
            audit(of_servers(folder, out, url, url, reference="after"))
        said = []
        audit(of_servers(folder, out, url, other_url), said.append)
    (counted,) = [text for text in said if "requests, about" in text]
    # A prompt and a likelihood of each of 24 passages, and four tests.
    assert counted.endswith("The server of the reference gets 52 of them, too.")


def test_what_the_reference_has_answered_is_not_asked_again(folder, tmp_path):
    with serving(folder / "adapter") as (host, url), serving(folder / "base") as (other, other_url):
        host.name = "some-file.gguf"
        other.faults += [""] * 14 + ["500"]
        spec = of_servers(folder, tmp_path / "out", url, other_url)
        with pytest.raises(ConnectionError, match=r"12 answers are saved in .*reference\.jsonl"):
            audit(spec)
        num_asked = len(host.asked)
        answered = [payload for _, payload in other.asked[2:14]]
        other.asked.clear()
        said = []
        audit(spec, said.append)
    assert any("answers of an audit that ended early" in text for text in said)
    assert f"{url} answers for after as some-file.gguf." in said
    # Only the tests, of prompts and likelihoods, are repeated.
    assert len(host.asked) - num_asked == REQUESTS_PER_PROMPT_TEST + REQUESTS_PER_LIKELIHOOD_TEST
    assert len(other.asked) > REQUESTS_PER_PROMPT_TEST
    assert not any(payload in answered for _, payload in other.asked)
    assert not (tmp_path / "out" / "unfinished").exists()


def test_the_server_of_the_reference_may_give_no_likelihoods(folder, tmp_path, monkeypatch):
    with serving(folder / "base") as (_, url), serving(folder / "adapter") as (_, other_url):

        def problem(server):
            return "it gives none" if server.base_url == other_url else None

        monkeypatch.setattr(ServerLM, "likelihood_problem", problem)
        said = []
        result = audit(of_servers(folder, tmp_path / "out", url, other_url), said.append)
    assert (
        "Likelihoods of the reference are left out: its server cannot be used for them, it gives "
        "none."
    ) in said
    assert "auc" in result.summary["measures"]
    table = next(one for one in result.report.tables if one.name == "before_and_after")
    assert "Membership AUC, by the loss" not in [*table.frame["Measure"]]
    assert not verify(tmp_path / "out").changed


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
