"""Results as text: GitHub-markdown tables that also read well in a terminal, and one example to look at."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfidf_tune.analysis._samples import ProbeSample
from tfidf_tune.analysis._summary import MemorizationSummary

if TYPE_CHECKING:
    from tfidf_tune.data import Passage

_COLUMNS = (
    "Objective",
    "Progress",
    "Avg Prefix",
    "Max Prefix",
    "Avg LMS",
    "Max LMS",
    "ROUGE-L",
    "Control LMS",
    "Perplexity",
)


@dataclass(frozen=True)
class CheckpointResult:
    """What one checkpoint of one run measured.

    Args:
        objective (str): name of the training objective, as tables and figures show it.
        progress (int): training progress in percent.
        targets (MemorizationSummary): the injected passages.
        controls (MemorizationSummary): the never-injected passages: the floor that chance and fluency alone reach.
        perplexity (float): token-level perplexity on unseen text.
    """

    objective: str
    progress: int
    targets: MemorizationSummary
    controls: MemorizationSummary
    perplexity: float


def memorization_table(rows: Sequence[CheckpointResult]) -> str:
    """The columns of the paper's Table 1 by progress, with the controls' average LMS and the perplexity.

    LMS and prefix matches are in tokens, ROUGE-L is × 100; lower is better in each of the measures.

    Args:
        rows (Sequence[CheckpointResult]): one a checkpoint, in the order to show.

    Returns:
        str: a markdown table without a final newline.
    """
    return _markdown(_COLUMNS, [_cells(row) for row in rows])


def relative_reduction(baseline: float, other: float) -> float:
    """``(baseline - other) / baseline``: 0.58 where ``other`` is 58% lower, negative where it is higher.

    Args:
        baseline (float): value under the baseline objective.
        other (float): value under the objective that is compared to it.

    Returns:
        float: a fraction; nan for a baseline of 0, which leaves nothing to reduce.
    """
    return (baseline - other) / baseline if baseline else float("nan")


def qualitative_example(
    samples_by_objective: Mapping[str, Sequence[ProbeSample]],
    passages: Sequence["Passage"],
    decode: Callable[[list[int]], str],
    *,
    width: int = 100,
) -> str:
    """The target that the first objective recites most, as in the paper's qualitative table.

    Of the targets' samples with the shortest prefix, the one with the highest LMS under the first objective
    is taken, the first of equals. White space is collapsed to fit the width.

    Args:
        samples_by_objective (Mapping[str, Sequence[ProbeSample]]): objective -> its samples; the first is the
            baseline.
        passages (Sequence[Passage]): those that were probed; the prompt is theirs.
        decode (Callable[[list[int]], str]): token ids -> text.
        width (int): of the text block in characters.

    Returns:
        str: prompt, ground truth and each objective's continuation with LMS and ROUGE-L, no final newline.

    Raises:
        ValueError: If the baseline has no sample of a target, or another objective or the passages lack the
            one that is taken.
    """
    baseline, samples = next(iter(samples_by_objective.items()))
    targets = [sample for sample in samples if sample.kind == "target"]
    if not targets:
        raise ValueError(f"{baseline!r} has no sample of a target: probe it on the injected passages.")
    shortest = min(sample.prefix_length for sample in targets)
    example = max((sample for sample in targets if sample.prefix_length == shortest), key=lambda sample: sample.lms)
    passage = next((passage for passage in passages if passage.id == example.passage_id), None)
    if passage is None:
        raise ValueError(f"Passage {example.passage_id!r} is not in passages: give those that were probed.")
    prompt = decode(passage.token_ids[example.offset : example.offset + example.prefix_length])
    parts = [(f"Prompt ({passage.id}, {shortest} tokens)", prompt), ("Ground truth", example.reference_text)]
    for objective, its_samples in samples_by_objective.items():
        sample = _same_prompt(objective, its_samples, example)
        parts.append((f"{objective} (LMS={sample.lms}, R-L={sample.rouge_l:.1f})", sample.generated_text))
    indent = " " * 4
    return "\n\n".join(
        f"{title}\n{textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)}"
        for title, text in parts
    )


def _same_prompt(objective: str, samples: Sequence[ProbeSample], example: ProbeSample) -> ProbeSample:
    prompt = (example.passage_id, example.offset, example.prefix_length)
    for sample in samples:
        if (sample.passage_id, sample.offset, sample.prefix_length) == prompt:
            return sample
    raise ValueError(
        f"{objective!r} has no sample of passage {example.passage_id!r} at offset {example.offset} with "
        f"prefix length {example.prefix_length}: probe every objective on the same prompts."
    )


def _cells(row: CheckpointResult) -> tuple[str, ...]:
    return (
        row.objective.replace("|", "\\|"),
        f"{row.progress}%",
        f"{row.targets.avg_prefix:.2f}",
        f"{row.targets.max_prefix}",
        f"{row.targets.avg_lms:.2f}",
        f"{row.targets.max_lms}",
        f"{row.targets.rouge_l:.2f}",
        f"{row.controls.avg_lms:.2f}",
        f"{row.perplexity:.2f}",
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column to the left, the numbers to the right, padded to one width a column."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in [header, rule, *rows]
    )
