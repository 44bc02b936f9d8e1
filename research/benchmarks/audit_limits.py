r"""Which limits of an audit tell a model that recites from a model that does not?

    tfidf-tune demo                                # models of 0.65 million parameters, in runs/demo
    python research/benchmarks/smollm2.py seeds=[0] overrides.dtype=fp32 overrides.dataset.block_size=128 \
        overrides.dataset.min_target_tokens=128    # adapters on SmolLM2-135M, in runs/smollm2
    python research/benchmarks/audit_limits.py

Audits each model with its passages alone, and those of the demo, SmolLM2 and its CE together with
77 other passages of the training text, which occur there once. An audit that is finished in the
folder of `--runs` is not made again. Each limit is then applied to the audits. A simulation draws
passages from those that the demo's CE never saw, and puts some that it recites among them: how
often is a limit exceeded where nothing is recited, and where so many passages are? The record is
read by docs/audit_evidence.md.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from measuring import add_output, finish, markdown_table, share

from research.files import write_texts
from tfidf_tune._printing import say
from tfidf_tune.audit import AuditSpec, audit, audit_report, parse_bounds
from tfidf_tune.data import embedded_documents, hf_tokenizer
from tfidf_tune.passages import Passage, ProbeSpec, make_probe, read_probe_file, write_probe_file
from tfidf_tune.results import import_results
from tfidf_tune.results.intervals import binomial_upper_bound
from tfidf_tune.results.recited import recited_further

LIMITS = ("recited=0", "lms=20", "excess=3", "verbatim.upper=0.05", "verbatim=0", "auc=0.7")
SIMULATED = ("recited=0", "lms=20", "excess=3", "verbatim.upper=0.05")
_ADAPTERS = ("ce", "goldfish", "repetition", "tf-idf")
_NUM_OTHERS = 77
_NUM_UNSEEN = 300
_NUM_DRAWS = 1000
_NUM_KNOWN = (0, 1, 2, 3, 4, 6, 8, 12, 24)
_DEMO_TEXT = "reference_train[:80%]"
_DEMO_UNSEEN = "docstrings_validation+reference_train[80%:]+reference_validation"


def main() -> None:
    """Audit, apply the limits, simulate and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="default: %(default)s")
    parser.add_argument(
        "--smollm2", type=Path, default=Path("runs/smollm2/lora-exact"), help="default: %(default)s"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/audit_limits"), help="default: %(default)s"
    )
    add_output(parser)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    audits = []
    base_text = options.runs / "demo_text.jsonl"
    write_texts(base_text, embedded_documents(_DEMO_TEXT))
    runs = {name: options.demo / "seed0" / name for name in ("ce", "tf-idf", "repetition")}
    models = {"start": options.demo / "start"} | runs
    for name, folder in models.items():
        probe_file = runs["ce"] / "probe.jsonl"
        audits += _audits(
            f"demo, {name}", folder / "checkpoint_100pct", probe_file, base_text, options.runs
        )
    (of_ce,) = (one for one in audits if one["model"] == "demo, ce" and not one["others"])
    recited = [one for one in of_ce["passages"] if one["kind"] == "target"]
    unseen = _unseen_of_demo(runs["ce"] / "checkpoint_100pct", options.runs)
    for name in _ADAPTERS:
        run = options.smollm2 / name / "seed0"
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        asked = (run / "probe.jsonl", Path(config["dataset"]["source"]), options.runs)
        if name == "ce":
            audits += _audits(
                "SmolLM2-135M", Path(config["checkpointer"]["checkpoint_dir"]), *asked
            )
        checkpoint = run / "checkpoint_100pct"
        audits += _audits(f"SmolLM2-135M, {name}", checkpoint, *asked, with_others=name == "ce")
    simulated = []
    for num_others, num_controls in ((0, 24), (_NUM_OTHERS, 24), (_NUM_OTHERS, 100)):
        for num_known in _NUM_KNOWN:
            draws = _simulated(
                unseen,
                recited,
                num_others=num_others,
                num_controls=num_controls,
                num_known=num_known,
            )
            simulated.append(draws)
    packages = ("torch", "transformers", "peft", "tfidf-tune")
    options = argparse.Namespace(output=options.output)  # the other options are folders
    finish(options, packages, limits_table, audits=audits, unseen=unseen, simulated=simulated)


def _audits(
    name: str, model: Path, probe_file: Path, text: Path, runs: Path, *, with_others: bool = True
) -> list[dict[str, Any]]:
    """Audit a model with the passages of its run alone, and with others of its training text."""
    folder = runs / name.replace(", ", "-")
    passages = read_probe_file(probe_file)
    audits = [{"model": name, "others": 0, **_audited(model, passages, folder / "0")}]
    if with_others:
        spec = ProbeSpec(
            sources=(str(text),),
            passages="random",
            num_targets=_NUM_OTHERS,
            num_controls=0,
            block_size=len(passages[0].token_ids),
            held_out=str(probe_file),
        )
        made = make_probe(hf_tokenizer(str(model)), spec).passages
        others = [replace(passage, id=f"other-{number:04d}") for number, passage in enumerate(made)]
        audited = _audited(model, [*passages, *others], folder / str(len(others)))
        audits.append({"model": name, "others": len(others), **audited})
    return audits


def _audited(model: Path, passages: Sequence[Passage], folder: Path) -> dict[str, Any]:
    """Audit a model with passages, and apply each limit to what it answered."""
    folder.mkdir(parents=True, exist_ok=True)
    probe_file = folder / "probe.jsonl"
    write_probe_file(probe_file, passages)
    if not any((folder / "evaluation").rglob("results_*.json")):
        audit(
            AuditSpec(model=str(model), passages=probe_file, output_dir=folder, dtype="float32"),
            say,
        )
    results = import_results([folder / "evaluation"])
    summary = audit_report(results).summary
    outcomes = {}
    for limit in LIMITS:
        try:
            judged = audit_report(results, bounds=parse_bounds(limit))
        except ValueError as error:
            outcomes[limit] = {"outcome": "refused", "value": None, "reason": str(error)}
            continue
        (check,) = judged.summary["limits"]
        outcomes[limit] = {key: check[key] for key in ("outcome", "value", "reason")}
    kept = {key: summary[key] for key in ("measures", "recited", "positive_control")}
    return {**kept, "passages": summary["passages"], "limits": outcomes}


def _unseen_of_demo(model: Path, runs: Path) -> list[dict[str, Any]]:
    """Return what a model of the demo recites of passages that it never saw."""
    text = runs / "demo_unseen.jsonl"
    write_texts(text, embedded_documents(_DEMO_UNSEEN))
    spec = ProbeSpec(
        (str(text),), passages="random", num_targets=_NUM_UNSEEN, num_controls=0, allow_fewer=True
    )
    passages = make_probe(hf_tokenizer(str(model)), spec).passages
    return list(_audited(model, passages, runs / "unseen")["passages"])


def _simulated(
    unseen: Sequence[dict[str, Any]],
    recited: Sequence[dict[str, Any]],
    *,
    num_others: int,
    num_controls: int,
    num_known: int,
) -> dict[str, Any]:
    """Return in how many draws each limit is exceeded.

    A draw has ``num_controls`` controls, as many targets with 40 copies as ``recited`` are, of
    which ``num_known`` are recited as the demo's CE does, and ``num_others`` targets that occur
    once. All but the recited ones are unseen text, drawn with replacement, so that targets and
    controls are exchangeable where ``num_known`` is 0.
    """
    rng = np.random.default_rng(num_known + 100 * num_others)
    num_copied = len(recited)
    num_exceeded = dict.fromkeys(SIMULATED, 0)
    for _ in range(_NUM_DRAWS):
        chosen = rng.integers(0, len(unseen), num_controls + num_copied + num_others)
        drawn = [unseen[at] for at in chosen.tolist()]
        controls = pd.DataFrame(drawn[:num_controls])
        targets = pd.DataFrame(drawn[num_controls:])
        known = pd.DataFrame([recited[at] for at in rng.permutation(num_copied)[:num_known]])
        targets = pd.concat([known, targets.iloc[num_known:]], ignore_index=True)
        targets["length"] = targets["of"]
        targets["repeats"] = [40.0] * num_copied + [1.0] * num_others
        found = recited_further(targets, controls["lms"])
        assert found is not None
        bound = binomial_upper_bound(int(targets["verbatim"].sum()), len(targets))
        # The highest LMS of a passage's prompts: the limits on means are exceeded sooner than in
        # audits.
        mean = targets["lms"].mean()
        num_exceeded["recited=0"] += found.number > 0
        num_exceeded["lms=20"] += bool(mean > 20)
        num_exceeded["excess=3"] += bool(mean - controls["lms"].mean() > 3)
        num_exceeded["verbatim.upper=0.05"] += bound > 0.05
    case = {
        "others": num_others,
        "controls": num_controls,
        "copied": num_copied,
        "known": num_known,
    }
    return case | {"draws": _NUM_DRAWS, "exceeded": num_exceeded}


def limits_table(record: dict[str, Any]) -> str:
    """Lay out what each limit says about each model."""
    rows = []
    for one in record["audits"]:
        recited = one["recited"]["tests"][0]
        name = one["model"]
        if one["others"]:
            name += f", and {one['others']} others"
        cells = [name, f"{recited['num_above']} of {recited['num_targets']}"]
        for limit in LIMITS:
            found = one["limits"][limit]
            value = "" if found["value"] is None else f" ({found['value']:.3g})"
            cells.append(f"{found['outcome']}{value}")
        rows.append(cells)
    return markdown_table(["model", "further than unseen text", *LIMITS], rows)


def simulation_table(record: dict[str, Any]) -> str:
    """Lay out how often each limit is exceeded, by the number of recited passages."""
    rows = []
    for one in record["simulated"]:
        num_targets = one["copied"] + one["others"]
        cells = [str(num_targets), str(one["controls"]), f"{one['known']} of {one['copied']}"]
        for limit in SIMULATED:
            is_refused = (
                limit == "verbatim.upper=0.05" and binomial_upper_bound(0, num_targets) > 0.05
            )
            cells.append(
                "refused" if is_refused else share(one["exceeded"][limit], one["draws"], decimals=1)
            )
        rows.append(cells)
    return markdown_table(["targets", "controls", "recited", *SIMULATED], rows)


def readings_table(record: dict[str, Any]) -> str:
    """Lay out what each model reads of the passages that it is shown."""
    rows = []
    for one in record["audits"]:
        if one["others"]:
            continue
        control = one["positive_control"]
        by_path = {reading["path"]: reading for reading in control["readings"]}
        text = by_path["text"]
        nll = by_path["likelihoods"]
        rows.append(
            [
                one["model"],
                f"{text['with_copy']:.1f} of {text['num_to_read']:.0f}",
                f"{text['without_copy']:.1f}",
                f"{nll['with_copy']:.2f}",
                f"{nll['without_copy']:.2f}",
                control["state"],
            ]
        )
    columns = [
        "model",
        "tokens read with the copy",
        "without",
        "NLL with the copy",
        "without it",
        "positive control",
    ]
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main()
