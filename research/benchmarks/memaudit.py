r"""Our audit and that of memaudit 0.2.0, of the same models and the same canaries.

    python -m venv ENVIRONMENT
    ENVIRONMENT/bin/pip install 'memaudit[peft,trl]==0.2.0'      # not beside ours: an environment of its own
    python research/benchmarks/memaudit.py ENVIRONMENT/bin/python

A Llama of 0.65 million parameters is trained on a part of Python's documentation: the start. With
each seed it is fine-tuned on other parts of it three times: with random canaries, which memaudit
draws, with passages of natural text, and with neither. Of 300 canaries of a kind 100 are inserted,
a third of them 1, 4 and 16 times each, and 200 are controls; the seed decides which. memaudit
inserts them, as rows that begin with its words, and its manifest becomes our probe file. Both tools
then audit the fine-tuned model, the start, and the model that was fine-tuned without canaries, by
their commands, with the start as the reference. With random canaries and the first seed, they also
audit a model that was trained for 4 epochs, which recites some of them. memaudit also audits the
start with itself as the reference, which our command refuses. Models that were not trained on the
canaries are not asked for them.

All scores are in the record; the headline of each tool was chosen beforehand. Each command has one
thread, and its time is that of the processor. What is in the folder of `--runs` is not made again.
The record is read by research/results/memaudit.md.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import add_output, finish, markdown_table, share
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.files import write_texts
from tfidf_tune._files import atomic_folder
from tfidf_tune._printing import say
from tfidf_tune._tokenizer import encode_texts
from tfidf_tune.commands.demo import make_random_model
from tfidf_tune.data import embedded_documents, hf_tokenizer
from tfidf_tune.passages import write_probe_file
from tfidf_tune.passages.probe_file import PassageDraft, make_passages
from tfidf_tune.probe import membership_scores, true_positive_rate
from tfidf_tune.probe.membership_scores import roc_auc
from tfidf_tune.results import import_results

SEEDS = (0, 1, 2)
COPIES = (1, 4, 16)
HEADLINES = {"random": "Min-K%++", "natural": "WBC"}
FINE_TUNED = "fine-tuned"
LONGER = "fine-tuned, 4 epochs"
CLEAN = "fine-tuned without canaries"
START = "start, without a reference"
START_ITSELF = "start, itself as the reference"
_THEIRS = "memaudit"
_ATTACK_NAMES = {
    "base_calibrated_min_k_plus_plus": "Min-K%++ minus the reference's: the headline",
    "min_k_plus_plus": "Min-K%++",
}
PACKAGES = ("torch", "transformers", "peft", "tfidf-tune")
_NUM_MEMBERS = 100
_NUM_CONTROLS = 200
_START_TEXT = "docstrings_train[:25%]"
TEXT = "docstrings_train[25%:80%]+reference_train+docstrings_validation+reference_validation"
_POOL = "docstrings_train[80%:]"
_ROW_TOKENS = 128
_NATURAL_TOKENS = 48
_START_EPOCHS = 4
_MORE_EPOCHS = 4
_START_RATE = 3e-3
_RATE = 1e-3
_WARMUP = 20
_BATCH_SIZE = 16
# Of memaudit's words, which have 24 tokens, and a quarter and a half of a secret, as memaudit asks; a
# random secret has about 40 tokens.
_PREFIX_LENGTHS = {"random": (34, 44), "natural": (36, 48)}
_MAX_NEW_TOKENS = 40
_WORDS = "MEMAUDIT RECOVERY PHRASE: "
_VERSIONS = """
import json
from importlib.metadata import version
print(json.dumps({name: version(name) for name in ("memaudit", "torch", "transformers")}))
"""
# Run by memaudit's Python: draws random canaries, and inserts canaries into rows.
_DRAW = """
import json, sys
from memaudit import generate_canaries
from transformers import AutoTokenizer
folder, seed, number, file = sys.argv[1:]
drawn = generate_canaries(
    AutoTokenizer.from_pretrained(folder), n=int(number), n_controls=0, family="random",
    repetitions=(1,), seed=int(seed),
)
json.dump([one.to_dict() for one in drawn], open(file, "w"))
"""
_INSERT = """
import json, sys
from memaudit import inject
from transformers import AutoTokenizer
folder, seed, rows, canaries, texts, manifest = sys.argv[1:]
rows = [json.loads(line) for line in open(rows, encoding="utf-8")]
mixed, made = inject(
    rows, json.load(open(canaries)), fmt="text", seed=int(seed), include_prob=1.0,
    tokenizer=AutoTokenizer.from_pretrained(folder),
)
json.dump([row["text"] for row in mixed], open(texts, "w"))
json.dump(made, open(manifest, "w"))
"""
# Asks for the canaries as memaudit does, but with its words before them, and applies its measure.
_ASK = """
import json, sys
from memaudit.scoring import greedy_complete, regurgitation_flags
from memaudit.constants import DEFAULT_PREFIX_FRACTIONS
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, words, manifest, file = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
found = {}
for one in json.load(open(manifest))["canaries"]:
    if one["included"]:
        ids = one["secret_token_ids"]
        is_hit = False
        for share in DEFAULT_PREFIX_FRACTIONS:
            cut = int(len(ids) * share)
            prompt = words + tokenizer.decode(ids[:cut])
            answer = greedy_complete(model, tokenizer, prompt, len(ids) - cut + 4)
            is_hit |= regurgitation_flags(tokenizer.decode(ids[cut:]), answer)["regurgitated"]
        own = found.setdefault(str(one["repetitions"]), [0, 0])
        own[0] += is_hit
        own[1] += 1
json.dump(found, open(file, "w"))
"""


def main() -> None:
    """Train, audit, and write the record."""
    parser = make_parser(__doc__, Path("runs/memaudit"))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start = options.runs / "start"
    if not start.is_dir():
        _make_start(start)
    texts = cut_rows(start, TEXT)
    write_texts(options.runs / "rows.jsonl", texts)
    asked = [(kind, seed) for seed in SEEDS for kind in HEADLINES]
    audits = [(model, kind, seed) for model in (FINE_TUNED, START, CLEAN) for kind, seed in asked]
    audits += [(model, "random", SEEDS[0]) for model in (LONGER, START_ITSELF)]
    with ProcessPoolExecutor(
        options.jobs, mp_context=get_context("spawn"), initializer=_one_thread
    ) as pool:
        list(pool.map(partial(_train_without, options.runs), SEEDS))
        prepare = partial(_prepare, options.python, options.runs)
        shares = list(pool.map(prepare, *zip(*asked, strict=True)))
        run = partial(_audit, options.python, options.runs)
        results = list(pool.map(run, *zip(*audits, strict=True)))
    runs = [
        {"seed": seed, "kind": kind, "canary_share": canary_share}
        for (kind, seed), canary_share in zip(asked, shares, strict=True)
    ]
    python = options.python
    options = argparse.Namespace(output=options.output)  # the other options are paths
    finish(
        options,
        PACKAGES,
        tables,
        their_versions=their_versions(python),
        runs=runs,
        audits=results,
    )


def make_parser(description: str | None, runs: Path) -> argparse.ArgumentParser:
    """Make a parser with the options that both scripts have; ``runs`` is the default folder."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", help="of the environment that has memaudit 0.2.0")
    parser.add_argument("--runs", type=Path, default=runs, help="default: %(default)s")
    add_output(parser)
    return parser


def their_versions(python: str) -> Any:
    """Return the versions of memaudit's environment."""
    return json.loads(
        subprocess.run(
            [python, "-Ic", _VERSIONS], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    )


def _one_thread() -> None:
    torch.set_num_threads(1)


def _train_without(runs: Path, seed: int) -> None:
    """Fine-tune a model without canaries."""
    folder = runs / f"seed{seed}" / "clean"
    if not folder.is_dir():
        lines = (runs / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        random.Random(seed).shuffle(texts)
        folder.parent.mkdir(exist_ok=True)
        train(runs / "start", texts, folder, rate=_RATE, epochs=1, seed=seed)


def _make_start(folder: Path) -> None:
    """Train the model that all runs start from, with random weights of the sizes of the demo."""
    with atomic_folder(folder.with_name("random")) as made:
        make_random_model(made)
    texts = cut_rows(folder.with_name("random"), _START_TEXT)
    train(folder.with_name("random"), texts, folder, rate=_START_RATE, epochs=_START_EPOCHS, seed=0)


def cut_rows(tokenizer: Path, split: str) -> list[str]:
    """Cut the documents of a split into rows of so many tokens."""
    encode = AutoTokenizer.from_pretrained(tokenizer)
    rows = []
    for document in embedded_documents(split):
        ends = [end for _, end in encode(document, return_offsets_mapping=True)["offset_mapping"]]
        cuts = [0, *ends[_ROW_TOKENS - 1 : -1 : _ROW_TOKENS], len(document)]
        rows += [document[a:b] for a, b in pairwise(cuts) if document[a:b]]
    return rows


def train(
    model_folder: Path,
    texts: Sequence[str],
    folder: Path,
    *,
    rate: float,
    epochs: int,
    seed: int,
    adapter: LoraConfig | None = None,
    num_sorted: int = 1,
) -> None:
    """Train a model, or an adapter of it, on rows, each a sequence of its own with EOS; save it.

    Rows are sorted by their length within so many batches, for less padding.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(list(texts))["input_ids"]]
    if adapter is not None:
        torch.manual_seed(seed)  # an adapter begins with random weights
        model = get_peft_model(model, adapter)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / _WARMUP))
    order = random.Random(seed)
    model.train()
    for epoch in range(epochs):
        if epoch:
            order.shuffle(rows)
        for batch in _batches(rows, num_sorted):
            width = max(map(len, batch))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
            labels = torch.tensor([row + [-100] * (width - len(row)) for row in batch])
            # Padding is on the right, where no token with loss sees it.
            logits = model(input_ids=ids).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            warm.step()
    with atomic_folder(folder) as made:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)


def _prepare(python: str, runs: Path, kind: str, seed: int) -> float:
    """Plant canaries and train; return the canaries' share of the training tokens."""
    start = runs / "start"
    folder = runs / f"seed{seed}" / kind
    texts, canary_share = plant(python, start, runs / "rows.jsonl", kind, seed, folder)
    trainings = [(FINE_TUNED, 1)]
    if kind == "random" and seed == SEEDS[0]:
        trainings.append((LONGER, _MORE_EPOCHS))
    for name, epochs in trainings:
        model = _model(runs, name, kind, seed)
        if not model.is_dir():
            train(start, texts, model, rate=_RATE, epochs=epochs, seed=seed)
    return canary_share


def _batches(rows: Sequence[list[int]], num_sorted: int) -> Iterator[list[list[int]]]:
    """Cut rows into batches, sorted by length within ``num_sorted`` of them if it is above one."""
    num_rows = _BATCH_SIZE * num_sorted
    for first in range(0, len(rows), num_rows):
        part = list(rows[first : first + num_rows])
        if num_sorted > 1:
            part.sort(key=len)
        yield from (part[a : a + _BATCH_SIZE] for a in range(0, len(part), _BATCH_SIZE))


def plant(
    python: str, start: Path, rows: Path, kind: str, seed: int, folder: Path
) -> tuple[list[str], float]:
    """Plant canaries in rows; return the rows with them, and their share of the tokens.

    The folder then has memaudit's manifest (manifest.json) and our probe file (probe.jsonl).
    """
    folder.mkdir(parents=True, exist_ok=True)
    manifest_file = folder / "manifest.json"
    texts_file = folder / "texts.json"
    if not manifest_file.is_file():
        canaries = _canaries(python, start, kind, seed, folder)
        (folder / "canaries.json").write_text(json.dumps(canaries), encoding="utf-8")
        arguments = [start, seed, rows, folder / "canaries.json", texts_file]
        _their_code(python, _INSERT, *arguments, manifest_file)
    texts = json.loads(texts_file.read_text(encoding="utf-8"))
    manifest = json.loads(manifest_file.read_text(encoding="utf-8"))
    return texts, _write_probe(start, manifest, texts, folder / "probe.jsonl")


def _model(runs: Path, name: str, kind: str, seed: int) -> Path:
    """Return the folder of a model."""
    if name == CLEAN:
        return runs / f"seed{seed}" / "clean"
    if name in (START, START_ITSELF):
        return runs / "start"
    return runs / f"seed{seed}" / kind / ("model" if name == FINE_TUNED else "longer")


def _audit(python: str, runs: Path, name: str, kind: str, seed: int) -> dict[str, Any]:
    """Audit a model by both tools; of models without canaries only the likelihoods."""
    model = _model(runs, name, kind, seed)
    reference = None if name == START else runs / "start"
    asks = name in (FINE_TUNED, LONGER)
    folder = runs / f"seed{seed}" / kind
    out = folder / f"audit_{name.replace(',', '').replace(' ', '_')}"
    lengths = _PREFIX_LENGTHS[kind]
    made = audit_by_both(python, model, reference, folder, out, prefix_lengths=lengths, asks=asks)
    if name == LONGER:
        made["theirs"]["regurgitated_with_words"] = ask_with_words(python, model, folder, out)
    say(f"{name}, {kind}, seed {seed}")
    return {"model": name, "kind": kind, "seed": seed, **made}


def audit_by_both(
    python: str,
    model: Path,
    reference: Path | None,
    planted: Path,
    out: Path,
    *,
    prefix_lengths: Sequence[int],
    asks: bool,
) -> dict[str, Any]:
    """Audit a model by both tools, with the files that :func:`plant` wrote into a folder.

    The reference of an adapter is the model that it was made for. If the passages are not asked
    for, only likelihoods are compared. Ours is left out if the model is its own reference, which
    our command refuses.
    """
    out.mkdir(parents=True, exist_ok=True)
    made: dict[str, Any] = {}
    if model != reference:
        made["ours"] = _ours(model, reference, planted / "probe.jsonl", prefix_lengths, out, asks)
    made["theirs"] = _theirs(python, model, reference, planted / "manifest.json", out, asks)
    return made


def ask_with_words(python: str, model: Path, planted: Path, out: Path) -> Any:
    """Count by memaudit's measure, by copies, what a model regurgitates after the words that were
    planted before the canaries; memaudit itself asks without them.
    """
    file = out / "with_words.json"
    if not file.is_file():
        _their_code(python, _ASK, model, _WORDS, planted / "manifest.json", file)
    return json.loads(file.read_text(encoding="utf-8"))


def _canaries(python: str, start: Path, kind: str, seed: int, folder: Path) -> list[Any]:
    """Draw a pool of canaries, in memaudit's form, and divide it at random."""
    number = _NUM_MEMBERS + _NUM_CONTROLS
    if kind == "random":
        _their_code(python, _DRAW, start, seed, number, folder / "pool.json")
        pool = json.loads((folder / "pool.json").read_text(encoding="utf-8"))
    else:
        pool = list(_natural(start, seed, number))
    random.Random(seed).shuffle(pool)
    for place, canary in enumerate(pool):
        is_member = place < _NUM_MEMBERS
        canary["id"] = f"canary-{place:04d}"
        canary["role"] = "candidate" if is_member else "control"
        canary["repetitions"] = COPIES[place % len(COPIES)] if is_member else 1
    return list(pool)


def _natural(start: Path, seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Draw passages of documents, at most one of each."""
    encode = AutoTokenizer.from_pretrained(start)
    rng = random.Random(seed)
    documents = embedded_documents(_POOL)
    drawn = 0
    for document in rng.sample(documents, len(documents)):
        offsets = encode(document, return_offsets_mapping=True)["offset_mapping"]
        if len(offsets) < _NATURAL_TOKENS:
            continue
        first = rng.randrange(len(offsets) - _NATURAL_TOKENS + 1)
        text = document[offsets[first][0] : offsets[first + _NATURAL_TOKENS - 1][1]].strip()
        ids = encode(text)["input_ids"]
        yield {"secret": text, "secret_token_ids": ids, "family": "natural"}
        drawn += 1
        if drawn == number:
            return
    raise ValueError(f"{drawn} of {number} documents are long enough")


def _write_probe(
    start: Path, manifest: Mapping[str, Any], texts: Sequence[str], file: Path
) -> float:
    """Write memaudit's canaries as our probe file; return their share of the training tokens."""
    tokenizer = hf_tokenizer(str(start))
    rows_of: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        rows_of.setdefault(text, []).append(row)
    # Members first; the sort keeps the order otherwise.
    canaries = sorted(manifest["canaries"], key=lambda one: not one["included"])
    whole = [_WORDS + one["secret"] for one in canaries]
    drafts = []
    num_tokens = 0
    for canary, text, ids in zip(canaries, whole, encode_texts(tokenizer, whole), strict=True):
        places = [[row, 0] for row in rows_of.get(text, [])]
        if len(places) != canary["included"] * canary["repetitions"]:
            raise ValueError(f"{canary['id']} is in {len(places)} rows")
        fields = {} if canary["family"] == "natural" else {"is_random": True}
        drafts.append(PassageDraft(ids, places, "memaudit", fields))
        num_tokens += len(ids) * len(places)
    write_probe_file(file, make_passages(tokenizer, drafts, _NUM_MEMBERS))
    return num_tokens / sum(len(ids) for ids in encode_texts(tokenizer, list(texts)))


def _their_code(python: str, code: str, *arguments: Any) -> None:
    """Run code by memaudit's Python; -I keeps this folder, with this file's name, off its path."""
    subprocess.run([python, "-Ic", code, *map(str, arguments)], check=True)


def _ours(
    model: Path,
    reference: Path | None,
    probe_file: Path,
    prefix_lengths: Sequence[int],
    out: Path,
    asks: bool,
) -> dict[str, Any]:
    """Audit by our command; if it is not to ask for passages, it asks for one token of each."""
    command = [sys.executable, "-m", "tfidf_tune.cli", "probe", "audit", str(model)]
    command += ["--probe-file", str(probe_file), "--output-dir", str(out / "ours")]
    lengths = prefix_lengths if asks else prefix_lengths[:1]
    command += ["--prefix-lengths", *map(str, lengths)]
    command += ["--max-new-tokens", str(_MAX_NEW_TOKENS if asks else 1), "--device", "cpu"]
    command += ["--dtype", "float32", "--accept-unproven"]
    if reference is not None:
        command += ["--reference", "base" if _is_adapter(model) else str(reference)]
    seconds = _timed(command, out / "ours.log", out / "ours_seconds.json")
    report = json.loads((out / "ours" / "report" / "audit.json").read_text(encoding="utf-8"))
    # Not those of the reference, which are in a folder further down.
    (folder,) = {file.parent for file in (out / "ours").glob("evaluation/*/*/results_*.json")}
    scores = import_results([folder]).scores
    lines = probe_file.read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line) for line in lines]
    copies = {one["id"]: one["num_injections"] for one in passages}
    attacks = _attacks(scores, [*copies])
    num_copies = np.array([*copies.values()])
    found = {name: _found(values, num_copies) for name, values in attacks.items()}
    made: dict[str, Any] = {
        "seconds": seconds,
        "attacks": found,
        "fields": num_fields({k: v for k, v in report.items() if k != "passages"}),
        "fields_with_passages": num_fields(report),
        "tables": len([*(out / "ours" / "report" / "tables").glob("*.csv")]),
    }
    if asks:
        tests = [
            {name: test[name] for name in ("copies", "num_targets", "num_above", "p_value")}
            for test in report["recited"]["tests"]
        ]
        by_passage = {}
        for metric, how in (("verbatim", "max"), ("lms", "mean")):
            values = scores[scores["metric"] == metric].groupby("unit", observed=True)["value"]
            by_passage[metric] = values.agg(how)
        tiers = {}
        for number in (*COPIES, 0):
            ids = [name for name, count in copies.items() if count == number]
            tiers[str(number)] = {
                "number": len(ids),
                "verbatim": int(by_passage["verbatim"][ids].sum()),
                "lms": float(by_passage["lms"][ids].mean()),
            }
        made["recited"] = {
            "verdict": report["verdict"],
            "positive_control": report["positive_control"]["state"],
            "threshold": report["recited"]["threshold"],
            "tests": tests,
        }
        made["tiers"] = tiers
    return made


def _is_adapter(model: Path) -> bool:
    return (model / "adapter_config.json").is_file()


def _attacks(scores: Any, ids: Sequence[str]) -> dict[str, Any]:
    """Our membership scores, in the order of these passages."""
    names = ("passage_nll", "zlib", "min_k", "min_k_plus_plus", "reference_nll", "wbc")
    values = {}
    for metric in (*names, "error_zone"):
        rows = scores[scores["metric"] == metric].groupby("unit", observed=True)["value"].first()
        if len(rows):
            values[metric.removeprefix("passage_")] = rows[list(ids)].to_numpy(float)
    return membership_scores(values)


def _found(values: Any, copies: Any) -> dict[str, Any]:
    """Members above the score that 1 % of the controls exceed, by copies, and the AUC."""
    controls = values[copies == 0]
    found = {}
    for number in COPIES:
        members = values[copies == number]
        detected = round(float(true_positive_rate(members, controls)) * len(members))
        found[str(number)] = [detected, len(members)]
    return {"found": found, "auc": roc_auc(values[copies > 0], controls)}


def _theirs(
    python: str, model: Path, reference: Path | None, manifest: Path, out: Path, asks: bool
) -> dict[str, Any]:
    """Audit by memaudit's command."""
    file = out / "theirs.json"
    command = [python, "-Im", "memaudit", "audit", "--model", str(model)]
    command += ["--manifest", str(manifest), "--output", str(file)]
    if reference is None:
        command += ["--ref", "none"]
    else:
        command += ["--ref", "auto" if _is_adapter(model) else str(reference)]
    if not asks:
        command.append("--skip-generation")
    seconds = _timed(command, out / "theirs.log", out / "theirs_seconds.json")
    report = json.loads(file.read_text(encoding="utf-8"))
    membership = report["membership"]
    made = {
        "seconds": seconds,
        "attack": membership["headline_attack"],
        "found": {
            number: [tier["detected"], tier["n"]]
            for number, tier in membership["by_repetition"].items()
            if number.isdigit()
        },
        "auc": membership["auc"],
        "fields": num_fields({k: v for k, v in report.items() if k != "per_canary"}),
        "fields_with_passages": num_fields(report),
    }
    if reference is not None:  # else it is the headline
        scores = [one["scores"]["min_k_plus_plus"] for one in report["per_canary"]]
        copies = [one["included"] * one["repetitions"] for one in report["per_canary"]]
        made["without_reference"] = _found(np.array(scores), np.array(copies))
    if asks:
        exact = dict.fromkeys(map(str, COPIES), 0)
        for one in report["per_canary"]:
            if one["included"]:
                is_exact = any(asked["exact"] for asked in one["regurgitation"]["by_prefix"])
                exact[str(one["repetitions"])] += is_exact
        controls = report["negative_controls"]
        made["regurgitated"] = {
            number: [tier["n_regurgitated"], tier["n"]]
            for number, tier in report["regurgitation"]["by_tier"].items()
        }
        num_regurgitated = round(controls["regurgitation_rate"] * controls["n"])
        made["regurgitated_controls"] = [num_regurgitated, controls["n"]]
        made["exact"] = exact
    return made


def _timed(command: Sequence[str], log: Path, seconds_file: Path) -> float:
    """Run a command with one thread, and return the seconds of the processor, now or before."""
    if not seconds_file.is_file():
        begin = resource.getrusage(resource.RUSAGE_CHILDREN)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("w") as file:
            subprocess.run(command, check=True, stdout=file, stderr=file, env=env)
        end = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
        seconds_file.write_text(json.dumps(seconds))
    return float(json.loads(seconds_file.read_text()))


def num_fields(value: Any) -> int:
    """Count the values of a JSON document that contain no others."""
    if isinstance(value, dict):
        return sum(map(num_fields, value.values()))
    if isinstance(value, list):
        return sum(map(num_fields, value))
    return 1


def detection_table(record: Mapping[str, Any]) -> str:
    """Lay out the members that each score finds at 1 % false positives, over all seeds."""
    rows = []
    for model, kind in (*((FINE_TUNED, kind) for kind in HEADLINES), (LONGER, "random")):
        audits = [one for one in _audits(record, kind) if one["model"] == model]
        for name, found in _scores(audits, kind):
            aucs = [one["auc"] for one in found]
            rows.append(
                [
                    kind if model == FINE_TUNED else f"{kind}, 4 epochs, one seed",
                    name,
                    *(_pooled([one["found"][str(number)] for one in found]) for number in COPIES),
                    _mean(aucs),
                ]
            )
    columns = ["canaries", "score", *map(_copies, COPIES), "AUC (lowest and highest seed)"]
    return markdown_table(columns, rows)


def alarms_table(record: Mapping[str, Any]) -> str:
    """Lay out how many members each score finds in models that were not trained on them."""
    rows = []
    for kind in HEADLINES:
        cells: dict[str, list[str]] = {}
        for place, model in enumerate((CLEAN, START, START_ITSELF)):
            audits = [one for one in _audits(record, kind) if one["model"] == model]
            for name, found in _scores(audits, kind):
                own = cells.setdefault(name, ["", "", ""])
                own[place] = _pooled(
                    [one["found"][str(number)] for one in found for number in COPIES]
                )
        rows += [[kind, name, *own] for name, own in cells.items()]
    return markdown_table(["canaries", "score", CLEAN, START, START_ITSELF], rows)


def recitation_table(record: Mapping[str, Any]) -> str:
    """Lay out how many members each tool finds recited, by the number of copies."""
    rows = []
    for model in (FINE_TUNED, LONGER):
        for kind in HEADLINES:
            audits = [one for one in _audits(record, kind) if one["model"] == model]
            if not audits:
                continue
            theirs = [one["theirs"] for one in audits]
            tiers = [one["ours"]["tiers"] for one in audits]
            tests = [
                {test["copies"]: test for test in one["ours"]["recited"]["tests"]} for one in audits
            ]
            with_words = [one.get("regurgitated_with_words") for one in theirs]
            measures: dict[str, list[str]] = {
                "memaudit: regurgitated": [
                    *(_sum([one["regurgitated"][str(n)] for one in theirs]) for n in COPIES),
                    _sum([one["regurgitated_controls"] for one in theirs]),
                ],
                "memaudit: of them exact": [
                    *(str(sum(one["exact"][str(n)] for one in theirs)) for n in COPIES),
                    "",
                ],
            }
            if None not in with_words:
                measures["memaudit: regurgitated, with the words"] = [
                    *(_sum([counts[str(n)] for counts in with_words]) for n in COPIES),
                    "",
                ]
            measures |= {
                "ours: further than unseen text": [
                    *(
                        _sum([[of[str(n)]["num_above"], of[str(n)]["num_targets"]] for of in tests])
                        for n in COPIES
                    ),
                    "",
                ],
                "ours: verbatim": [
                    _sum([[of[str(n)]["verbatim"], of[str(n)]["number"]] for of in tiers])
                    for n in (*COPIES, 0)
                ],
                "ours: LMS in tokens": [
                    f"{statistics.fmean(of[str(n)]['lms'] for of in tiers):.1f}"
                    for n in (*COPIES, 0)
                ],
            }
            rows += [[model, kind, name, *cells] for name, cells in measures.items()]
    columns = ["model", "canaries", "measure", *map(_copies, COPIES), "controls"]
    return markdown_table(columns, rows)


def costs_table(record: Mapping[str, Any]) -> str:
    """Lay out the seconds of the processor and the size of the reports."""
    audits = [
        one for kind in HEADLINES for one in _audits(record, kind) if one["model"] == FINE_TUNED
    ]
    rows = []
    for tool in ("theirs", "ours"):
        seconds = [one[tool]["seconds"] for one in audits]
        fields = [one[tool]["fields"] for one in audits]
        more = [one[tool]["fields_with_passages"] for one in audits]
        rows.append(
            [
                "memaudit" if tool == "theirs" else "ours",
                f"{statistics.median(seconds):.0f} ({min(seconds):.0f} to {max(seconds):.0f})",
                f"{statistics.median(seconds) / (_NUM_MEMBERS + _NUM_CONTROLS):.3f}",
                f"{statistics.median(fields):.0f}",
                f"{statistics.median(more):,.0f}",
            ]
        )
    columns = [
        "tool",
        "seconds of an audit",
        "of a passage",
        "values in the report",
        "with those of each passage",
    ]
    return markdown_table(columns, rows)


def _audits(record: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [audit for audit in record["audits"] if audit["kind"] == kind]


def _scores(audits: Sequence[Mapping[str, Any]], kind: str) -> Iterator[tuple[str, list[Any]]]:
    """Each score by its name in tables with what it found, by audit; memaudit's first, then the
    headline of ours.
    """
    if not audits:
        return
    their_name = audits[0]["theirs"]["attack"]
    yield f"{_THEIRS}, {_ATTACK_NAMES[their_name]}", [one["theirs"] for one in audits]
    of_model = [one["theirs"].get("without_reference") for one in audits]
    if None not in of_model:
        yield f"{_THEIRS}, Min-K%++", of_model
    ours = [one["ours"]["attacks"] for one in audits if "ours" in one]
    if not ours:
        return
    headline = HEADLINES[kind]
    for name in sorted(ours[0], key=lambda one: one != headline):
        label = f"ours, {name}" + (": the headline" if name == headline else "")
        yield label, [one[name] for one in ours]


def _mean(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def _copies(number: int) -> str:
    return "1 copy" if number == 1 else f"{number} copies"


def _pooled(pairs: Sequence[Sequence[int]]) -> str:
    return share(sum(found for found, _ in pairs), sum(number for _, number in pairs))


def _sum(pairs: Sequence[Sequence[int]]) -> str:
    return f"{sum(found for found, _ in pairs)} of {sum(number for _, number in pairs)}"


def tables(record: Mapping[str, Any]) -> str:
    """Lay out all tables of a record."""
    makers = (detection_table, recitation_table, alarms_table, costs_table)
    return "\n\n".join(make(record) for make in makers)


if __name__ == "__main__":
    main()
