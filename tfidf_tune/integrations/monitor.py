"""The monitor: memorization measured while a ``Trainer`` of transformers, TRL or Axolotl trains.

Targets and controls come from a probe file, as training on the injected corpus or ``tfidf-tune
probe make`` writes it.
"""

import inspect
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from tfidf_tune._checks import base_model, cache_argument, require_integer
from tfidf_tune._files import remove_folder
from tfidf_tune.data import HFTokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import MemorizationProbe, evaluating, greedy_continuations


class MemorizationCallback(TrainerCallback):  # type: ignore[misc]
    """Measures the memorization of a probe file during training and adds it to the trainer's own
    logs.

    Before the first optimizer step, every ``every_n_steps`` and at the end of training the logs
    get::

        memorization_target_lms           mean longest memorized substring of the targets, in tokens
        memorization_target_prefix_match  mean number of tokens recited without an error
        memorization_target_nll           mean -ln P of a token of their continuations

    and the same of the controls, as ``memorization_control_...``. Before the first step also
    ``memorization_shown_lms`` and ``memorization_not_shown_lms``, what the model reads of ten
    controls with a copy in front and without: if it does not read them, low numbers say nothing,
    which a message says. LMS and prefix match are those of the task ``tfidf_memorization``.
    Training itself is not changed: weights and losses are bit for bit equal to a run without the
    callback, until the threshold ends it.

    With several processes, each computes the whole probe, because sharded models need all of them.
    A resumed run continues with the next measurement::

        trainer.add_callback(MemorizationCallback("probe.jsonl", every_n_steps=50, trainer=trainer))

    Args:
        probe_file (str | Path): targets and controls.
        every_n_steps (int): optimizer steps between two measurements.
        trainer (Trainer): the trainer that gets the callback: transformers', or one derived from
            it.
        prefix_length (int): tokens of a passage that are the prompt; a completion has its own.
            Default: 50.
        max_new_tokens (int): most tokens that are generated and compared. Default: 128.
        batch_size (int): passages in a forward pass. Default: 32.
        stop_above (float | None): threshold for the mean LMS of the targets, in tokens. Default:
            None.
        when_above (Literal["stop", "keep"]): what happens above the threshold: "stop" ends training
            with a checkpoint; "keep" continues, and ``below_threshold`` in the trainer's
            ``output_dir`` keeps the model of the last measurement that was not above it. Default:
            "stop".
        bos (bool | None): whether BOS is before each prompt. Default: None, if the tokenizer adds
            it, or else if it lowers the NLL of the controls.

    Raises:
        FileNotFoundError: If there is no probe file.
        ValueError: If a setting is out of range, or the probe file does not fit the trainer's
            tokenizer or model.
    """

    def __init__(
        self,
        probe_file: str | Path,
        every_n_steps: int,
        *,
        trainer: Trainer,
        prefix_length: int = 50,
        max_new_tokens: int = 128,
        batch_size: int = 32,
        stop_above: float | None = None,
        when_above: Literal["stop", "keep"] = "stop",
        bos: bool | None = None,
    ) -> None:
        require_integer("every_n_steps", every_n_steps, 1)
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        if getattr(tokenizer, "eos_token_id", None) is None:
            raise ValueError(
                f"the trainer's processing_class is {type(tokenizer).__name__}, without an "
                "eos_token"
            )
        self._probe = MemorizationProbe(
            read_probe_file(probe_file),
            HFTokenizer(tokenizer),
            prefix_length=prefix_length,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            stop_above=stop_above,
            when_above=when_above,
            bos=bos,
        )
        for obstacle in _obstacles(trainer.model, self._probe):
            raise ValueError(f"memorization cannot be measured: {obstacle}")
        self._trainer = trainer
        self._every_n_steps = every_n_steps
        self._has_saved = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure the model that training starts from; raise a ``ValueError`` above a threshold
        that ends training.
        """
        if state.global_step > 0:  # resumed
            return
        reason = self._measure(args, state, control)
        if reason:
            raise ValueError(
                f"before training {reason}: choose a higher threshold, or other targets"
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure if it is due, or if this step is the last."""
        if state.global_step % self._every_n_steps and not control.should_training_stop:
            return
        reason = self._measure(args, state, control)
        if reason and not control.should_training_stop:
            control.should_training_stop = True
            control.should_save = True
            _report(state, f"training stops after step {state.global_step}: {reason}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure the final model, if something else ended training after a step without a
        measurement.
        """
        measurements = [entry for entry in state.log_history if "memorization_target_lms" in entry]
        if all(entry["step"] != state.global_step for entry in measurements):
            self._measure(args, state, control)

    def _measure(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl
    ) -> str | None:
        """Measure and log, and leave the trainer as it was; return why training should stop, if it
        should.
        """
        should_log = control.should_log
        model = self._trainer.model
        with evaluating(model):
            last_logits = partial(_last_logits, model)
            generate = partial(greedy_continuations, model)
            reading: dict[str, float] = {}
            if state.global_step == 0:
                config = model.config.get_text_config()
                limit = getattr(config, "max_position_embeddings", None)
                reading, notice = self._probe.show_controls(last_logits, generate, limit)
                if notice:
                    _report(state, notice)
            metrics = self._probe.measure(last_logits, generate)
            # In train mode TRL's trainers would add the means of their own metrics to these, and
            # forget them.
            self._trainer.log(metrics | reading)
        # log() has set it to false, and the trainer's own entry is still due.
        control.should_log = should_log
        # Keep the model while it is below the threshold; one process writes, all wait for it.
        folder = Path(args.output_dir) / "below_threshold"
        is_of_another_run = folder.exists() and not self._has_saved
        if self._probe.keeps and state.global_step == 0 and is_of_another_run:
            raise ValueError(
                f"{folder} is of another run: move it away, or choose another output_dir"
            )
        notice_above = self._probe.keep_below(state.global_step, metrics, folder, self._save)
        if notice_above:
            _report(state, notice_above)
        return self._probe.reason_to_stop(metrics)

    def _save(self, folder: Path) -> None:
        """Write the model into a temporary folder, and rename that when it is complete."""
        self._has_saved = True  # a training that begins again may replace it
        temporary = folder.with_name(f".{folder.name}")
        is_writer = self._trainer.args.should_save
        wait_for_everyone = self._trainer.accelerator.wait_for_everyone
        if is_writer:
            shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        wait_for_everyone()
        # Otherwise it would be pushed to the hub.
        self._trainer.save_model(str(temporary), _internal_call=True)
        wait_for_everyone()
        if is_writer:
            weights = [*temporary.glob("*.safetensors"), *temporary.glob("*.bin")]
            if not weights:
                raise ValueError(
                    f"no weights are in {temporary}: when_above='keep' needs FULL_STATE_DICT under "
                    "FSDP"
                )
            remove_folder(folder)
            temporary.replace(folder)
        wait_for_everyone()


def _last_logits(model: PreTrainedModel, ids_bs: Tensor, num_last: int) -> Tensor:
    ids_bs = ids_bs.to(next(model.parameters()).device)
    logits: Tensor = model(input_ids=ids_bs, use_cache=False, logits_to_keep=num_last).logits
    return logits


def _obstacles(model: PreTrainedModel, probe: MemorizationProbe) -> Iterator[str]:
    """Yield why the probe cannot be measured on a model, before training."""
    config = model.config.get_text_config()
    model_class = type(base_model(model))
    known = inspect.signature(model_class.forward).parameters  # TRL replaces that of the instance
    limit = getattr(config, "max_position_embeddings", None)
    if model.config.is_encoder_decoder:
        yield f"{model_class.__name__} has an encoder and a decoder: use a causal language model"
    peft_configs = getattr(model, "peft_config", {}).values()
    if any(getattr(peft_config, "is_prompt_learning", False) for peft_config in peft_configs):
        yield (
            "prompt tuning and its relatives prepend virtual tokens: use LoRA or another method of "
            "PEFT"
        )
    missing = sorted({cache_argument(model), "logits_to_keep"} - known.keys())
    if missing:
        yield (
            f"{model_class.__name__} takes no {', '.join(missing)}: use a model that generates "
            "with a KV cache"
        )
    if probe.max_token_id >= config.vocab_size:
        yield (
            f"the probe file has the token id {probe.max_token_id}, the model the ids 0 to "
            f"{config.vocab_size - 1}: take the tokenizer that belongs to the model"
        )
    if limit is not None and probe.num_positions > limit:
        yield (
            f"a prompt and its continuation have up to {probe.num_positions} tokens, the model has "
            f"{limit} positions: lower max_new_tokens or prefix_length"
        )


def _report(state: TrainerState, message: str) -> None:
    if state.is_world_process_zero:
        print(message, file=sys.stderr)


__all__ = ["MemorizationCallback"]
