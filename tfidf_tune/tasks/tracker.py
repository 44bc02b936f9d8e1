"""The harness's writer of results, in which a file that cannot be written completely
is an error.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lm_eval.loggers import EvaluationTracker

from tfidf_tune._files import require_writable


class CompleteTracker(EvaluationTracker):  # type: ignore[misc]
    """Writes the results and samples of an evaluation, all of them or none.

    The harness only logs an error of writing, and leaves what it has written until then.
    """

    def __init__(self, output_path: str | None = None, **more: Any) -> None:
        """Take the arguments of the harness's class.

        Raises:
            OSError: If there is no writing at ``output_path``.
        """
        super().__init__(output_path=output_path, **more)
        if output_path:
            path = Path(output_path)
            require_writable("output_path", path.parent if path.suffix == ".json" else path)

    def save_results_aggregated(
        self, results: dict[str, Any], samples: dict[str, Any] | None = None
    ) -> None:
        """Write ``results_<date>.json``; raise an OSError if it is not complete."""
        super().save_results_aggregated(results=results, samples=samples)
        if self.output_path:
            path = Path(self.output_path)
            stem = path.stem if path.suffix == ".json" else "results"
            self._require_complete(f"{stem}_{self.date_id}.json", json.loads)

    def save_results_samples(self, task_name: str, samples: Any) -> None:
        """Write ``samples_<task>_<date>.jsonl``; raise an OSError if it does not
        have all samples.
        """
        super().save_results_samples(task_name=task_name, samples=samples)

        def read(content: bytes) -> None:
            lines = [json.loads(line) for line in content.splitlines()]
            if len(lines) != len(samples):
                raise ValueError(f"{len(lines)} of {len(samples)} samples")

        if self.output_path:
            self._require_complete(f"samples_{task_name}_{self.date_id}.jsonl", read)

    def _require_complete(self, name: str, read: Callable[[bytes], object]) -> None:
        """Read a file that was written; remove all files of this evaluation if that fails."""
        path = Path(self.output_path)
        # As the harness names it.
        folder = path.parent
        if path.suffix != ".json":
            folder = path / self.general_config_tracker.model_name_sanitized
        try:
            read((folder / name).read_bytes())
        except (OSError, ValueError) as error:
            for file in folder.glob(f"*_{self.date_id}.json*"):
                file.unlink()
            raise OSError(
                f"the results could not be written completely to {path}, and nothing of them is "
                "left there: make room, or choose another output_path, and evaluate again"
            ) from error
