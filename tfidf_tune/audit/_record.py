"""What an audit records of itself, so that somebody else can recompute it: the plan before the
first question, and hashes of all files after the last answer.
"""

import json
import platform
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune import _files
from tfidf_tune._checks import differences
from tfidf_tune.audit._choosing import DEFAULT_CONTROLS, Note
from tfidf_tune.audit._headline import planned_headline
from tfidf_tune.audit._model_files import ModelFiles, files_of
from tfidf_tune.audit._plan import Plan
from tfidf_tune.probe.positive_control import LEAST_SHARE_READ, MOST_P_VALUE
from tfidf_tune.results.intervals import NUM_RESAMPLES, SEED

if TYPE_CHECKING:
    from tfidf_tune.passages import Passage

PLAN = "plan.json"
SUMS = "SHA256SUMS"
"""In the folder of an audit, the hashes of its files, as ``sha256sum --check`` reads them."""
UNFINISHED = "unfinished"
PROBE_FILE = "probe.jsonl"
"""In the folder of an audit, the passages that it has chosen."""
_PLAN_VERSION = "1.0"
# Of a server: how it is asked, not what.
_OF_THE_CONNECTION = (
    "api_key_variable",
    "num_concurrent",
    "requests_per_minute",
    "timeout",
    "max_retries",
)
_SECRET = re.compile("token$|key|secret|password", re.IGNORECASE)
_PACKAGES = ("tfidf_tune", "torch", "transformers", "peft", "lm_eval", "numpy", "pandas")


def write_plan(plan: Plan, passages: "Sequence[Passage]", note: Note) -> tuple[dict[str, Any], str]:
    """Write ``plan.json`` before the first question; return its content and its SHA-256.

    An audit goes on in a folder, or is made again there, only by the plan that the folder has.

    Raises:
        ValueError: If the folder has another plan, unless the audit overwrites.
    """
    folder = plan.spec.folder
    file = folder / PLAN
    content = _planned(plan, passages)
    if file.is_file() and _is_asked(folder) and not plan.spec.overwrite:
        before = json.loads(file.read_text(encoding="utf-8"))
        now = deepcopy(content)
        # Of another reference all else differs, too.
        if before.get("reference", {}).get("name") != content["reference"]["name"]:
            for plan_of in (before, now):
                name = plan_of.get("reference", {}).get("name")
                plan_of["reference"] = "none" if name is None else name
                plan_of.get("rules", {}).pop("reference_model", None)
        changed = _changed_attacks(before.pop("attacks", []), now.pop("attacks"))
        changed += differences(before, now)
        if changed:
            raise ValueError(
                f"{folder} is the audit of another plan: {'; '.join(changed)}. Name "
                "another --output-dir, or replace that audit by --overwrite; to judge its answers "
                "by other limits: tfidf-tune probe audit --results"
            )
    else:
        with _files.atomic_file(file) as temporary:
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            temporary.write_text(text, encoding="utf-8")
    sha256 = _files.file_sha256(file)
    note(f"Plan, before the first question: {file}, SHA-256 {sha256}.")
    return content, sha256


def _changed_attacks(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[str]:
    """Return a phrase for each attack that is new, gone or different, by its name."""
    if before == now:
        return []
    gone = [attack for attack in before if attack not in now]
    new = [attack for attack in now if attack not in before]
    if not gone and not new:
        order = ", ".join(dict.fromkeys(attack["name"] for attack in now))
        return [f"the attacks are now in this order: {order}"]
    phrases = []
    added = list(new)
    for attack in gone:
        # The same attack with other settings, if there is one that is not yet taken.
        of_same_name = [other for other in added if other["name"] == attack["name"]]
        if of_same_name:
            other = of_same_name[0]
            added.remove(other)
            settings = ", ".join(differences(attack, other))
            phrases.append(f"of the attack {attack['name']}, {settings}")
        else:
            phrases.append(f"the attack {_with_prompts(attack)} is not there any more")
    return phrases + [
        f"the attack {_with_prompts(attack)} was not there before" for attack in added
    ]


def _with_prompts(attack: dict[str, Any]) -> str:
    """Name an attack with the part of a passage that is its prompt: one name can have several."""
    end = attack["offset"] + attack["prefix_length"]
    return f"{attack['name']} (prompts of tokens {attack['offset']} to {end})"


def discard_plan(folder: Path) -> None:
    """Remove the plan of an audit that cannot work, unless the model has answered something."""
    if not _is_asked(folder):
        (folder / PLAN).unlink(missing_ok=True)


def _is_asked(folder: Path) -> bool:
    return (folder / "evaluation").is_dir() or (folder / UNFINISHED).is_dir()


def _planned(plan: Plan, passages: "Sequence[Passage]") -> dict[str, Any]:
    """Return the content of ``plan.json``: all that decides about the result, JSON data."""
    spec = plan.spec
    kinds = [passage.kind for passage in passages]
    attacks = [asdict(attack) for attack in plan.affordable(len(passages))]
    for attack in attacks:
        attack["name"] = attack["name"] or "greedy"
    model_files = files_of(plan.model_args)
    reference_files = ModelFiles({}, {})
    if plan.reference is not None:
        reference_args = dict(plan.reference.model_args)
        if plan.reference.kind == "base":
            reference_args.pop("peft")  # which is switched off
        reference_files = files_of(reference_args, known=model_files.hashes)
    content = {
        "schema_version": _PLAN_VERSION,
        "headline": {
            "recitation": "passages that are recited further than unseen text, by the longest "
            "memorized substring of each over all prompts and attacks",
            "membership": planned_headline(plan, passages)._asdict(),
        },
        "model": {
            "name": spec.model,
            "backend": plan.model_name,
            "arguments": _deciding(plan.model_args),
            "files": model_files.hashes,
            "commits": model_files.commits,
        },
        "reference": {
            "name": spec.reference,
            "url": spec.reference_url,
            "files": reference_files.hashes,
            "commits": reference_files.commits,
        },
        "tokenizer": plan.tokenizer,
        "passages": {
            "targets": kinds.count("target"),
            "controls": kinds.count("control"),
            "file": PROBE_FILE if plan.chosen is not None else str(plan.probe_file.resolve()),
            "sha256": _files.file_sha256(plan.probe_file),
            "chosen_from": _chosen_from(plan.probe_file, plan.record),
        },
        "attacks": attacks,
        "rules": {**plan.settings, "stopping": "after max_new_tokens, or at EOS of a server"},
        "limits": spec.limits,
        "accept_unanswered": spec.accept_unanswered,
        "accept_unproven": spec.accept_unproven,
        "show_passages": spec.show_passages,
        "intervals": {
            "method": "percentile bootstrap over passages",
            "resamples": NUM_RESAMPLES,
            "seed": SEED,
        },
        "positive_control": {"largest_p": MOST_P_VALUE, "least_share_read": LEAST_SHARE_READ},
        "versions": _versions(),
    }
    # Tuples become lists, as in the file.
    normalized: dict[str, Any] = json.loads(json.dumps(content))
    return normalized


def _deciding(model_args: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model that decide about its answers, without secrets."""
    return {
        name: "(not recorded)" if _SECRET.search(name) else value
        for name, value in model_args.items()
        if name not in _OF_THE_CONNECTION
    }


def inputs_of(planned: dict[str, Any]) -> dict[str, Any]:
    """Return the hashes of a plan that ``audit.json`` has: of the passages, of what they were
    chosen from, and of the files of the model.
    """
    hashes: dict[str, Any] = {"probe_file": planned["passages"]["sha256"]}
    recorded = planned["passages"]["chosen_from"] or {}
    for key in ("texts", "controls", "tokenizer", "held_out", "holdout", "without_coin"):
        if recorded.get(key):
            hashes[key] = recorded[key]
    if recorded.get("controls"):
        hashes["controls_source"] = recorded.get("controls_source") or DEFAULT_CONTROLS
    hashes["model"] = planned["model"]["files"]
    return hashes


def _chosen_from(probe_file: Path, record: Path) -> dict[str, Any] | None:
    """Return what the passages were chosen from, by the record of the audit that has chosen them;
    None for a probe file that was there before.
    """
    if probe_file.parent != record.parent or not record.is_file():
        return None
    recorded: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return recorded


def _versions() -> dict[str, str]:
    installed = {package: version(package) for package in _PACKAGES if find_spec(package)}
    return {"python": platform.python_version(), **installed}


def write_sums(folder: Path) -> str:
    """Write the hashes of all files of an audit to ``SHA256SUMS``, and return the hash of that
    file: it stands for all of them.
    """
    lines = [f"{_files.file_sha256(folder / name)}  {name}\n" for name in recorded_files(folder)]
    with _files.atomic_file(folder / SUMS) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")
    return _files.file_sha256(folder / SUMS)


def read_sums(folder: Path) -> dict[str, str]:
    """Return the hash of each file by its name.

    Raises:
        ValueError: If the folder is no audit, or a line of the file is not a hash and the name of a
            file in the folder.
    """
    file = folder / SUMS
    if not file.is_file():
        raise ValueError(
            f"{folder} is no folder with {SUMS}: name the folder of an audit that tfidf-tune audit "
            "completed"
        )
    sums: dict[str, str] = {}
    lines = file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        sha256, separator, name = line.partition("  ")
        is_inside = not Path(name).is_absolute() and ".." not in Path(name).parts
        if len(sha256) != 64 or not separator or not name or not is_inside or name in sums:
            raise ValueError(
                f"{file}, line {number}: {line[:80]!r} is not a SHA-256 and the name of another "
                "file in the folder"
            )
        sums[name] = sha256
    return sums


def recorded_files(folder: Path) -> list[str]:
    """Return the names of the files that belong to an audit, relative to its folder, in order."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        is_temporary = any(_files.is_leftover(Path(part)) for part in name.parts)
        if path.is_file() and not is_temporary and name.parts[0] not in (SUMS, UNFINISHED):
            names.append(name.as_posix())
    return names


def others_in(folder: Path, sums: dict[str, str]) -> list[str]:
    """Return the names of everything in the folder that the audit did not write, and of links."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        is_other_file = not path.is_dir() and name not in (SUMS, *sums)
        if path.is_symlink() or is_other_file:
            names.append(name)
    return names
