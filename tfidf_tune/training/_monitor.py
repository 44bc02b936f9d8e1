"""The monitor: memorization of a probe file, measured while a recipe trains."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchtune.modules import local_kv_cache
from transformers.cache_utils import DynamicCache

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._tokenizer import known_bos
from tfidf_tune.loss import HeadInput
from tfidf_tune.models import HFCausalLM
from tfidf_tune.probe import MemorizationProbe, evaluating
from tfidf_tune.probe.decoding import decode_greedily, most_positions
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.probe.run_identity import written_bos
from tfidf_tune.training._data import read_passages
from tfidf_tune.training._errors import TrainingError, setup_errors
from tfidf_tune.training._folder import BELOW_THRESHOLD
from tfidf_tune.training._metrics import ProgressLog, require_finite
from tfidf_tune.training._model import FSDP_DTYPES
from tfidf_tune.training._run import Run


@dataclass(frozen=True)
class MemorizationMonitor:
    """Measures memorization every so many steps, for models of torchtune as :func:`prepare_model`
    prepares them.
    """

    probe: MemorizationProbe
    run: Run
    every_n_steps: int
    cache_dtype: torch.dtype

    def is_due(self, step: int, total_steps: int) -> bool:
        """Return whether a step, or the start as step 0, is followed by a measurement."""
        return step % self.every_n_steps == 0 or step == total_steps

    def measure(
        self, step: int, model: nn.Module, progress: ProgressLog, save: Callable[[Path], None]
    ) -> str | None:
        """Measure a prepared model after a step, 0 before the first; return why the run has to end,
        if so.
        """
        is_fp16 = self.run.dtype is torch.float16
        with (
            evaluating(model),
            torch.autocast(self.run.device.type, torch.float16, enabled=is_fp16),
        ):
            prepared = PreparedModel(model, self.run.device, self.cache_dtype)
            reading: dict[str, float] = {}
            notice = ""
            try:
                if step == 0:
                    limit = cast(int, model.max_seq_len)
                    reading, notice = self.probe.show_controls(
                        prepared.logits, prepared.continuations, limit
                    )
                metrics = self.probe.measure(prepared.logits, prepared.continuations)
            except NonFiniteLogits as error:
                raise TrainingError(f"step {step}: {error}") from error
        progress.log(step, metrics | reading)
        if notice:
            progress.note(notice)

        def save_finite(folder: Path) -> None:
            require_finite(model, step)
            save(folder)

        above = self.probe.keep_below(
            step, metrics, self.run.output_dir / BELOW_THRESHOLD, save_finite
        )
        if above:
            progress.note(above)
        progress.restart_clock()
        return self.probe.reason_to_stop(metrics)


def build_monitor(
    cfg: FinetuneConfig, dataset: Dataset[Any], tokenizer: Any, model: nn.Module, run: Run
) -> MemorizationMonitor | None:
    """Build the monitor of the config, if it has one; the model may be on the meta device.

    Raises:
        SetupError: If the probe file does not exist, or does not fit the tokenizer, the model or
            the settings.
    """
    section: Any = cfg.memorization_monitor
    if section is None:
        return None
    with setup_errors("config: memorization_monitor"):
        settings = {
            key: value
            for key, value in section.items()
            if key not in ("probe_file", "every_n_steps", "bos")
        }
        bos = section.bos
        if bos == "auto":
            data_sections = OmegaConf.to_container(cfg.dataset, resolve=True)
            bos = known_bos(tokenizer, written_bos(data_sections))
        passages = read_passages(cfg, dataset, section.probe_file)
        probe = MemorizationProbe(passages, tokenizer, bos=bos, **settings)
        longest = probe.num_positions
        limit = cast(int, model.max_seq_len)
        if longest > limit:
            raise ValueError(
                f"a prompt and its continuation have up to {longest} tokens, the model takes at "
                f"most {limit}: lower max_new_tokens or prefix_length"
            )
        if not isinstance(model, HFCausalLM) and not hasattr(model, "setup_caches"):
            raise ValueError(
                f"a {type(model).__name__} has no KV caches to generate text with: set it to null"
            )
    return MemorizationMonitor(
        probe, run, section.every_n_steps, FSDP_DTYPES[cfg.fsdp_param_dtype] or run.dtype
    )


@dataclass(frozen=True)
class PreparedModel:
    """A prepared model, perhaps sharded, as a probe takes models: logits, and greedy text by a KV
    cache.
    """

    model: nn.Module
    device: torch.device
    cache_dtype: torch.dtype

    def logits(self, ids_bs: Tensor, num_last: int) -> Tensor:
        """Return the last logits ``[b, num_last, v]`` of ids ``[b, s]``."""
        return _last_logits(self.model(ids_bs.to(self.device)), num_last)

    def continuations(
        self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]
    ) -> list[list[int]]:
        """Continue each prompt greedily by its number of tokens."""
        num_positions = most_positions(prompts, num_tokens)
        with _cached(
            self.model, len(prompts), num_positions, device=self.device, dtype=self.cache_dtype
        ) as run:

            def next_logits(ids: Tensor) -> Tensor:
                return _last_logits(run(ids), 1)

            return decode_greedily(next_logits, prompts, num_tokens, device=self.device)


@contextmanager
def _cached(
    model: nn.Module, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
) -> Iterator[Callable[[Tensor], Any]]:
    """Open a KV cache; yield a function that runs the next tokens ``[num_rows, n]`` of the rows."""
    if isinstance(model, HFCausalLM):
        yield partial(model, past_key_values=DynamicCache(config=cast(Any, model.hf.config)))
        return
    with local_kv_cache(
        model, batch_size=num_rows, decoder_max_seq_len=num_positions, device=device, dtype=dtype
    ):
        yield _NextTokens(model, num_rows, num_positions, device)


class _NextTokens:
    """Runs the next tokens of rows through a model of torchtune with a KV cache."""

    def __init__(
        self, model: nn.Module, num_rows: int, num_positions: int, device: torch.device
    ) -> None:
        everything = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device)
        self._model = model
        self._num_rows = num_rows
        self._may_attend = everything.tril()
        self._positions = torch.arange(num_positions, device=device)
        self._num_done = 0

    def __call__(self, tokens: Tensor) -> Any:
        end = self._num_done + tokens.shape[1]
        new = slice(self._num_done, end)
        self._num_done = end
        mask = self._may_attend[new].expand(self._num_rows, -1, -1)
        input_pos = self._positions[new].expand(self._num_rows, -1)
        return self._model(tokens, mask=mask, input_pos=input_pos)


def _last_logits(output: Any, num_last: int) -> Tensor:
    """Return the logits ``[b, num_last, v]`` of what a prepared model returns."""
    if isinstance(output, HeadInput):
        return F.linear(output.hidden[:, -num_last:], output.weight, output.bias)
    logits: Tensor = torch.cat(output, dim=1) if isinstance(output, list) else output
    return logits[:, -num_last:]
