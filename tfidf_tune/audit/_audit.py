"""An audit from its specification to its report: resolve, choose, ask, judge."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune import _files
from tfidf_tune.audit._asking import ask, connect, require_limits_possible
from tfidf_tune.audit._choosing import Note, choose
from tfidf_tune.audit._headline import headline_of_plan
from tfidf_tune.audit._judging import judge
from tfidf_tune.audit._measures import Bound, parse_bounds, require_possible
from tfidf_tune.audit._model_files import with_commits
from tfidf_tune.audit._plan import describe_requests, resolve
from tfidf_tune.audit._record import discard_plan, inputs_of, write_plan, write_sums
from tfidf_tune.audit._spec import AuditSpec, output_folder
from tfidf_tune.report import Report, require_report_folder

if TYPE_CHECKING:
    from tfidf_tune.passages import ProbeSpec


@dataclass(frozen=True)
class AuditResult:
    """What an audit gave: its report, written to ``page``, and the content of ``audit.json``, see
    ``docs/audit.md``. ``root`` is the hash that stands for all files of the audit; None of answers
    that were there before.
    """

    report: Report
    summary: dict[str, Any]
    page: Path
    accept_unproven: bool = False
    root: str | None = None

    @property
    def exceeded(self) -> list[str]:
        """Names of the measures that are above their limits."""
        return [limit["measure"] for limit in self.summary["limits"] if limit["outcome"] == "fail"]

    @property
    def unproven(self) -> str:
        """Why the audit is no all-clear although no limit is exceeded; "" if it is, or that was
        accepted.
        """
        control = self.summary["positive_control"]
        if control["state"] == "not shown" and not self.accept_unproven:
            return f"nothing is shown: {control['reason']}; --accept-unproven accepts that"
        undecided = [limit for limit in self.summary["limits"] if limit["outcome"] == "undecided"]
        reasons = []
        for limit in undecided:
            name = f"{limit['measure']}={limit['limit']:g}"
            reasons.append(f"{name} is undecided: {limit['reason']}")
        return "; ".join(reasons)


def audit(
    spec: AuditSpec, note: Note = lambda text: None, prices: Sequence[float] | None = None
) -> AuditResult:
    """Choose passages, ask a model for them, and write a report of what it recites.

    A second audit with the same output folder uses the passages of the first, and is refused if
    they were chosen from texts of other content or with other options, or while the first one runs.
    The answers of each audit are in another folder.

    Args:
        spec (AuditSpec): what to audit.
        note (Callable[[str], object]): takes what a person who waits should know. Default: nothing
            is said.
        prices (Sequence[float] | None): of a million tokens of prompts and of continuations, for
            the estimate of the cost. Default: None, none is given.

    Raises:
        ValueError: If the passages, options and limits do not fit each other; before the model is
            loaded.
        OSError: If a file cannot be read or written, or a server does not answer.
    """
    bounds = _limits(
        spec.limits,
        spec.folder,
        spec.passages,
        max_new_tokens=spec.max_new_tokens,
        accept_unanswered=spec.accept_unanswered,
        accept_unproven=spec.accept_unproven,
    )
    with _files.locked_folder(spec.folder):
        plan = resolve(spec)
        server = connect(plan)
        passages = choose(plan, note)
        if spec.server is not None or prices is not None:
            note(describe_requests(plan, passages, prices))
        require_limits_possible(plan, passages, bounds)
        plan = with_commits(plan)
        planned, planned_as = write_plan(plan, passages, note)
        try:
            with ask(plan, server, passages, bounds, note) as evaluated:
                report, summary = judge(
                    evaluated,
                    spec.folder / "report",
                    bounds,
                    accept_unanswered=spec.accept_unanswered,
                    accept_unproven=spec.accept_unproven,
                    show_passages=spec.show_passages,
                    inputs=inputs_of(planned),
                    recorded={
                        "plan": planned_as,
                        "evaluation": evaluated.relative_to(spec.folder).as_posix(),
                    },
                    date=_now(),
                    headline=headline_of_plan(planned),
                    passages=passages,
                )
        except ValueError:  # the settings cannot work
            discard_plan(spec.folder)
            raise
        root = write_sums(spec.folder)
    return _result(report, summary, spec.folder, spec.accept_unproven, root)


def estimate(
    spec: AuditSpec, prices: Sequence[float] | None = None, note: Note = lambda text: None
) -> str:
    """Choose the passages of an audit, and describe the requests, tokens and cost of asking for
    them.

    ``prices`` are of a million tokens of prompts and of continuations.
    """
    _limits(spec.limits, spec.folder, spec.passages, max_new_tokens=spec.max_new_tokens)
    with _files.locked_folder(spec.folder):
        plan = resolve(spec)
        connect(plan)  # so that wrong settings of a server are refused here, too
        return describe_requests(plan, choose(plan, note), prices)


def audit_results(
    evaluated: str | Path,
    output_dir: str | Path | None = None,
    limits: str | None = None,
    *,
    accept_unanswered: bool = False,
    accept_unproven: bool = False,
    show_passages: bool = False,
) -> AuditResult:
    """Write the report of answers that lm-evaluation-harness has recorded of one model.

    Args:
        evaluated (str | Path): folder of the harness's output, with samples of the memorization
            task.
        output_dir (str | Path | None): folder of the report. Default: None, ``runs/audit/NAME``.
        limits (str | None): as of :class:`AuditSpec`.
        accept_unanswered (bool): as of :class:`AuditSpec`.
        accept_unproven (bool): as of :class:`AuditSpec`.
        show_passages (bool): show passages in full. Default: False, excerpts.

    Raises:
        ValueError: If the folder holds several runs, or none with samples.
    """
    folder = output_folder(output_dir, evaluated)
    bounds = _limits(
        limits, folder, accept_unanswered=accept_unanswered, accept_unproven=accept_unproven
    )
    with _files.locked_folder(folder):
        report, summary = judge(
            Path(evaluated).expanduser(),
            folder / "report",
            bounds,
            accept_unanswered=accept_unanswered,
            accept_unproven=accept_unproven,
            show_passages=show_passages,
            inputs={},
            recorded={},
            date=_now(),
            headline=None,
        )
    return _result(report, summary, folder, accept_unproven)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _result(
    report: Report,
    summary: dict[str, Any],
    folder: Path,
    accept_unproven: bool,
    root: str | None = None,
) -> AuditResult:
    page = folder / "report" / "index.html"
    return AuditResult(
        report=report, summary=summary, page=page, accept_unproven=accept_unproven, root=root
    )


def _limits(
    limits: str | None,
    folder: Path,
    passages: "ProbeSpec | str | Path" = "",
    *,
    max_new_tokens: float = math.inf,
    accept_unanswered: bool = False,
    accept_unproven: bool = False,
) -> list[Bound]:
    """Read limits, and check before any work that the report can be written."""
    bounds = []
    if limits is not None:
        bounds = parse_bounds(
            limits, accept_unanswered=accept_unanswered, accept_unproven=accept_unproven
        )
    if not isinstance(passages, (str, Path)):
        require_possible(
            bounds, passages.num_targets, passages.num_controls, longest=max_new_tokens
        )
    require_report_folder(folder / "report")
    _files.require_writable("--output-dir", folder)
    return bounds
