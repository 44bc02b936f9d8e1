"""An audit is recomputed by somebody else: every hash from the files at hand, every score from the
stored answers, every figure from the scores.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

from tfidf_tune import _files
from tfidf_tune._checks import differences
from tfidf_tune._printing import counted
from tfidf_tune.audit._headline import headline_of_plan
from tfidf_tune.audit._judging import judge
from tfidf_tune.audit._measures import Bound, parse_bounds
from tfidf_tune.audit._model_files import find_file
from tfidf_tune.audit._record import PLAN, PROBE_FILE, SUMS, others_in, read_sums
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe.sample_fields import POSITIVE_CONTROL
from tfidf_tune.results.intervals import NUM_RESAMPLES, SEED

MEMORIZATION_TASK = "tfidf_memorization_prefixes"
RECORD = "passages.json"
_OF_EACH = (PLAN, "report/audit.json", "report/index.html", "report/report.json")
_SHOWN = 3  # of the differences that a check names


class Check(NamedTuple):
    """What was compared: the ``state`` is "same", "changed", or "not checked"."""

    what: str
    state: Literal["same", "changed", "not checked"]
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """The checks of an audit, and the hash that stands for all of its files."""

    checks: list[Check]
    root: str

    @property
    def changed(self) -> list[str]:
        """What is not as the audit left it."""
        return [check.what for check in self.checks if check.state == "changed"]


def verify(folder: str | Path) -> Verification:
    """Recompute an audit from its folder.

    Args:
        folder (str | Path): the output folder of ``tfidf-tune audit``.

    Returns:
        Verification: files by their hashes; the plan by the hash in the report; scores of
            continuations from the stored answers; all figures and the page from the scores, with
            the seeds of their intervals; texts, controls, tokenizer and weights by the hashes in
            the plan, where they are at hand. Likelihoods need the model, and are not computed
            again.

    Raises:
        ValueError: If the folder is no completed audit.
    """
    folder = Path(folder).expanduser()
    sums = read_sums(folder)
    root = _files.file_sha256(folder / SUMS)
    checks = [*_files_of(folder, sums)]
    if any(check.state == "changed" for check in checks):
        return Verification(checks, root)
    # A file with its right hash can still hold what no audit writes.
    try:
        plan = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        summary = json.loads((folder / "report" / "audit.json").read_text(encoding="utf-8"))
    except ValueError as error:
        checks.append(_unreadable("plan and audit.json", error))
        return Verification(checks, root)
    steps: dict[str, Callable[[], Iterable[Check]]] = {
        "plan": lambda: _plan(folder, plan, summary),
        "answers": lambda: _answers(_evaluated(folder, summary)),
        "report": lambda: [_report(folder, plan, summary)],
        "inputs": lambda: _inputs(folder, plan),
    }
    for what, step in steps.items():
        checks += _checked(what, step)
    return Verification(checks, root)


def _checked(what: str, step: "Callable[[], Iterable[Check]]") -> Iterator[Check]:
    try:
        yield from step()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        yield _unreadable(what, error)


def _unreadable(what: str, error: Exception) -> Check:
    problem = f"cannot be read ({type(error).__name__}: {error})"
    return Check(what, "changed", problem[:300])


def _evaluated(folder: Path, summary: dict[str, Any]) -> Path:
    """Return the folder of the answers, which is one of the audit's."""
    name = Path(summary["evaluation"])
    if name.is_absolute() or len(name.parts) != 2 or name.parts[0] != "evaluation":
        raise ValueError(f"audit.json names the answers in {name}, not in the folder of the audit")
    return folder / name


def _files_of(folder: Path, sums: dict[str, str]) -> Iterator[Check]:
    """Compare the files of the folder with their hashes."""
    changed = []
    for name, sha256 in sums.items():
        if not (folder / name).is_file():
            changed.append(f"{name} is missing")
        elif _files.file_sha256(folder / name) != sha256:
            changed.append(f"{name} has other content")
    missing = [name for name in _OF_EACH if name not in sums]
    changed += [f"{name} is not in {SUMS}" for name in missing]
    yield _compared(f"{counted(len(sums), 'file')} of the audit", changed)
    added = others_in(folder, sums)
    if added:
        yield Check("no other files in the folder", "changed", _some(added))


def _plan(folder: Path, plan: dict[str, Any], summary: dict[str, Any]) -> Iterator[Check]:
    """Compare the plan with its hash, and with what was asked."""
    is_same = _files.file_sha256(folder / PLAN) == summary["plan"]
    changed = [] if is_same else [f"audit.json follows from the plan {summary['plan'][:16]}"]
    yield _compared(f"{PLAN}, by its hash in audit.json", changed)

    # What was asked, by the documents of the answers.
    asked = set()
    for file in _samples(_evaluated(folder, summary), MEMORIZATION_TASK):
        for entry in _entries(file):
            doc = entry["doc"]
            attack = doc["attack"] or "greedy"
            asked.add((attack, doc["offset"], doc["prefix_length"], doc["max_new_tokens"]))
    limit = plan["rules"]["max_new_tokens"]
    planned = {
        (attack["name"], attack["offset"], attack["prefix_length"], limit)
        for attack in plan["attacks"]
    }
    own_prompts = {each for each in asked if each[2] == 0}  # completions, of any length
    changed = [f"asked {each}" for each in sorted(asked - own_prompts - planned)]
    changed += [f"planned {each}" for each in sorted(planned - asked) if not own_prompts]
    for name in ("targets", "controls"):
        if plan["passages"][name] != summary[f"num_{name}"]:
            changed.append(f"{plan['passages'][name]} {name} were planned")
    if plan["intervals"]["seed"] != SEED or plan["intervals"]["resamples"] != NUM_RESAMPLES:
        changed.append(f"intervals are of {NUM_RESAMPLES} resamples with seed {SEED}")
    files = plan["model"]["files"]
    if summary["inputs"]["model"] != files:
        changed.append("audit.json names other weights")
    yield _compared("what was asked, by the plan", changed)


def _answers(evaluated: Path) -> Iterator[Check]:
    """Score the stored answers again."""
    from tfidf_tune.tasks import memorization, positive_control

    score_again: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
        MEMORIZATION_TASK: (memorization.process_results, ("sample",)),
        POSITIVE_CONTROL: (positive_control.process_results, ("num_read", "generated_text")),
    }
    for task, (process, names) in score_again.items():
        for file in _samples(evaluated, task):
            yield _scored_again(file, task, process, names)
    yield Check("likelihoods", "not checked", "they need the model")
    # An audit that was made again keeps the answers that it had before.
    for other in sorted(evaluated.parent.iterdir()):
        if other != evaluated:
            yield Check(
                f"answers in {evaluated.parent.name}/{other.name}",
                "not checked",
                "the model was asked at another time, and no figure follows from them",
            )


def _scored_again(
    file: Path, task: str, process: Callable[..., Any], names: tuple[str, ...]
) -> Check:
    entries = _entries(file)
    what = f"{counted(len(entries), 'score')} of {task}, from the answers"
    changed = []
    for number, entry in enumerate(entries, start=1):
        if _flat(entry["resps"]) != _flat(entry["filtered_resps"]):
            changed.append(f"line {number}: resps")
        scored = deepcopy(entry["doc"])
        try:
            process(scored, entry["filtered_resps"])
        except OSError as error:
            return Check(what, "not checked", f"the tokenizer is not here ({error})"[:200])
        scores = [(name, _comparable(scored[name])) for name in names]
        for name, score in scores:
            if score != _comparable(entry["doc"][name]):
                changed += [f"line {number}: {name}"]
    return _compared(what, changed)


def _flat(responses: Any) -> list[Any]:
    """Return responses without the lists that group them."""
    if not isinstance(responses, list):
        return [responses]
    flat: list[Any] = []
    for response in responses:
        flat += _flat(response)
    return flat


def _samples(evaluated: Path, task: str) -> list[Path]:
    return sorted(evaluated.rglob(f"samples_{task}_2*.jsonl"))


def _entries(file: Path) -> list[dict[str, Any]]:
    """Read the lines of the harness; text in them may have other line ends than these."""
    lines = file.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def _comparable(value: Any) -> Any:
    """Return a score as JSON data, without what the text of an answer does not say."""
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if name != "unanswered"}
    return json.loads(json.dumps(value))


def _report(folder: Path, plan: dict[str, Any], summary: dict[str, Any]) -> Check:
    """Make the report again, and compare its files."""
    what = "figures, tables and page, from the scores"
    probe_file = _probe_file(folder, plan)
    if probe_file is None:
        return Check(what, "not checked", f"{plan['passages']['file']} is not here")
    with TemporaryDirectory() as temporary:
        made = Path(temporary) / "report"
        judge(
            _evaluated(folder, summary),
            made,
            _bounds(plan),
            accept_unanswered=plan["accept_unanswered"],
            accept_unproven=plan["accept_unproven"],
            show_passages=plan["show_passages"],
            inputs=summary["inputs"],
            recorded={"plan": summary["plan"], "evaluation": summary["evaluation"]},
            date=summary["date"],
            headline=headline_of_plan(plan),
            passages=read_probe_file(probe_file),
        )
        again = json.loads((made / "audit.json").read_text(encoding="utf-8"))
        changed = differences(summary, again)
        for path in sorted(made.rglob("*")):
            name = path.relative_to(made)
            if path.is_file() and path.read_bytes() != _content(folder / "report" / name):
                changed.append(f"report/{name.as_posix()}")
        written = {path.relative_to(made) for path in made.rglob("*")}
        for path in sorted((folder / "report").rglob("*")):
            if path.relative_to(folder / "report") not in written:
                changed.append(f"report/{path.relative_to(folder / 'report')} is of nothing")
    return _compared(what, changed)


def _bounds(plan: dict[str, Any]) -> list[Bound]:
    if plan["limits"] is None:
        return []
    return parse_bounds(
        plan["limits"],
        accept_unanswered=plan["accept_unanswered"],
        accept_unproven=plan["accept_unproven"],
    )


def _probe_file(folder: Path, plan: dict[str, Any]) -> Path | None:
    """Return the file of the passages; None if it was there before the audit, and is not here."""
    file = folder / plan["passages"]["file"]  # as it is, if it is a complete path
    is_here = file.is_file() and _files.file_sha256(file) == plan["passages"]["sha256"]
    return file if is_here else None


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _inputs(folder: Path, plan: dict[str, Any]) -> Iterator[Check]:
    """Compare hashes of the plan with what is at hand."""
    for role in ("model", "reference"):
        hashes = plan[role]["files"]
        if hashes:
            yield _hashed_files(f"weights of the {role}", hashes, plan[role]["commits"])
        elif plan[role]["name"]:
            yield Check(
                f"weights of the {role}",
                "not checked",
                f"the plan has no hashes of {plan[role]['name']}",
            )
    chosen = plan["passages"]["chosen_from"]
    if chosen is None:
        yield Check(
            "texts", "not checked", "the passages are of a probe file that was there before"
        )
        return
    recorded = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    yield _compared(f"{RECORD}, by the plan", differences(chosen, recorded))
    yield _hashed_files("texts", chosen["texts"], commits={})
    yield _chosen_again(folder, plan, chosen)


def _hashed_files(what: str, hashes: dict[str, str], commits: dict[str, str]) -> Check:
    """Compare files with their hashes; ``commits`` are of repositories that they may be in."""
    changed = []
    missing = []
    for name, sha256 in hashes.items():
        file = find_file(name, commits)
        if file is None:
            missing.append(name)
        elif _files.file_sha256(file) != sha256:
            changed.append(f"{name} has other content")
    if missing and not changed:
        return Check(what, "not checked", f"not here: {_some(missing)}")
    return _compared(what, changed)


def _chosen_again(folder: Path, plan: dict[str, Any], chosen: dict[str, Any]) -> Check:
    """Compare what the passages were chosen from: controls, tokenizer and options."""
    from tfidf_tune.data import hf_tokenizer
    from tfidf_tune.passages import ProbeSpec
    from tfidf_tune.passages.choosing import search_arguments

    what = "controls and tokenizer"
    names = [field.name for field in fields(ProbeSpec)]
    options = {name: chosen[name] for name in names if name in chosen}
    options["sources"] = tuple(options["sources"])
    if isinstance(options["held_out"], dict):  # the record has its hash, too
        options["held_out"] = options["held_out"]["file"]
    try:
        now = search_arguments(hf_tokenizer(plan["tokenizer"]), ProbeSpec(**options))
    except OSError as error:
        return Check(what, "not checked", str(error)[:200])
    except ValueError as error:
        is_missing = any(not Path(name).exists() for name in chosen["texts"])
        return Check(what, "not checked" if is_missing else "changed", str(error)[:200])
    now["probe_file"] = _files.file_sha256(folder / PROBE_FILE)
    return _compared(what, differences(chosen, json.loads(json.dumps(now))))


def _compared(what: str, changed: list[str]) -> Check:
    return Check(what, "changed", _some(changed)) if changed else Check(what, "same")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown
