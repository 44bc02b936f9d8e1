"""Token weightings in the Trainer of transformers.

    from tfidf_tune.integrations.transformers import TokenWeightingTrainer

    # TF-IDF; or weighting=GoldfishWeighting()
    trainer = TokenWeightingTrainer(model, args, train_dataset=dataset)

What the Trainer leaves to a loss, and :class:`TokenWeightingMixin` does: labels are shifted; the
sum over the tokens is divided by ``num_items_in_batch``, the tokens of all mini-batches and
processes of an optimizer step; evaluation is the Trainer's own.
"""

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.utils import logging

from tfidf_tune._checks import base_model, require_bool
from tfidf_tune.loss import (
    HeadInput,
    WeightedCrossEntropyLoss,
    token_cross_entropy,
    weight_statistics,
    weight_sums,
)
from tfidf_tune.weighting import (
    IGNORE_INDEX,
    TFIDFWeighting,
    TokenBatch,
    TokenWeighting,
    shift_labels,
    shift_tokens,
)
from tfidf_tune.weighting.token_weighting import require_no_tokens

__all__ = ["TokenWeightingMixin", "TokenWeightingTrainer", "trainer_loss"]

_logger = logging.get_logger(__name__)
# Where the Trainer's model computes its logits.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# In the file of a state: the name of the weighting; a keyword, so that no buffer is called this.
_CLASS = "class"
_Trainer: Any = object  # attributes and methods of the Trainer that the mixin is put before


def has_labels(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch has labels, shifted or not."""
    return inputs.get("labels") is not None or inputs.get("shift_labels") is not None


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a training batch has no labels."""
    if not has_labels(inputs):
        names = [name for name, value in inputs.items() if value is not None]
        present = ", ".join(names) or "nothing"
        raise ValueError(
            f"a training batch has no labels, only {present}: use a data collator that makes them"
        )


def check_first_batch(inputs: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if the labels of a batch are the token that follows each token of the
    input.

    A causal language model of transformers shifts the labels itself: it would predict the token
    after the next one. Labels that are not the tokens at their positions, as of masked language
    models, are an error too.
    """
    ids = inputs.get("input_ids")
    labels = inputs.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape:
        return
    # Labels that are the tokens themselves are as they should be: the trainer shifts them.
    valid = labels != IGNORE_INDEX
    if (labels == ids)[valid].all():
        return
    pairs = valid[:, :-1] & valid[:, 1:]  # the token after the last label may be padding
    is_shifted = labels[:, :-1] == ids[:, 1:]
    if pairs.any() and is_shifted[pairs].all():
        raise ValueError(
            "the labels are shifted already: pass input_ids as labels where a token counts, else "
            "-100"
        )
    raise ValueError(
        "labels differ from input_ids: make them equal, or -100 (a collator needs mlm=False)"
    )


def shifted_labels(inputs: Mapping[str, Any], num_positions: int) -> Tensor:
    """Return shifted labels ``[b, num_positions]``; the virtual tokens that prompt tuning puts in
    front have none.
    """
    shifted = inputs.get("shift_labels")
    if shifted is not None:
        return _pad(shifted, num_positions, IGNORE_INDEX)
    labels = _pad(inputs["labels"], num_positions, IGNORE_INDEX)
    return shift_labels(labels)


def token_batch(
    inputs: Mapping[str, Any], num_positions: int, *, needs_tokens: bool, first_pass: bool
) -> TokenBatch:
    """Return what a weighting gets of a batch, ``[b, num_positions]``, with the
    :func:`shifted_labels`.

    A document begins wherever ``position_ids``, ``[b, s]`` or ``[1, s]``, do not go on by 1, as for
    the attention of transformers: some models count from 2.
    """
    # Documents and tokens of the inputs first, each where its token is; then all moves with the
    # labels.
    labels = shifted_labels(inputs, num_positions)
    positions = inputs.get("position_ids")
    documents = None
    if positions is not None and positions.dim() == 2:  # not those of images too
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        documents = _pad(begins.cumsum(dim=1), num_positions, 0)
    all_tokens = None
    if needs_tokens:
        tokens = _tokens_without_padding(inputs)
        all_tokens = shift_tokens(_pad(tokens, num_positions, IGNORE_INDEX))
    if documents is not None:
        # The label at position i is the token at i + 1; the last position has no label, or the
        # first token.
        last = documents[:, :1] if needs_tokens else documents[:, -1:]
        documents = torch.cat([documents[:, 1:], last], dim=1).expand_as(labels)
    return TokenBatch(labels, documents, all_tokens, first_pass=first_pass)


def _tokens_without_padding(inputs: Mapping[str, Any]) -> Tensor:
    """Return the tokens of the inputs, ignored where the attention mask is 0."""
    tokens: Tensor | None = inputs.get("input_ids")
    mask = inputs.get("attention_mask")
    if tokens is None or (mask is not None and getattr(mask, "shape", None) != tokens.shape):
        raise ValueError(
            f"all tokens are counted, but input_ids are {_shape(tokens)} and attention_mask "
            f"{_shape(mask)}: pass both in one shape, or set counted to 'labels'"
        )
    if mask is None:
        return tokens
    return tokens.masked_fill(mask == 0, IGNORE_INDEX)


def _shape(value: Any) -> Any:
    """Return the shape of a tensor, and anything else unchanged."""
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _pad(tensor: Tensor, num_positions: int, value: int) -> Tensor:
    return F.pad(tensor, (num_positions - tensor.shape[1], 0), value=value)


def check_before_building(trainer: type, args: Any) -> None:
    """Raise a ``ValueError`` for a trainer of TRL, or a setting, whose loss the weights would not
    reach.
    """
    is_for_trl = any(base.__module__ == "tfidf_tune.integrations.trl" for base in trainer.__mro__)
    allowed = ("_BaseTrainer", "SFTTrainer") if is_for_trl else ("_BaseTrainer",)
    for base in trainer.__mro__:
        if base.__module__.startswith("trl.") and base.__name__ not in allowed:
            raise ValueError(
                f"{trainer.__name__} is derived from TRL's {base.__name__}, which computes its "
                "loss by itself: derive it from transformers.Trainer, or from "
                "TokenWeightingSFTTrainer"
            )
    for name, neutral in (("label_smoothing_factor", 0), ("loss_type", "nll")):
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(f"{name} is {value!r}, which knows no weights: set it to {neutral!r}")


def obstacles(trainer: Any, *, fused_head: bool) -> Iterator[str]:
    """Yield the settings of a Trainer, built already, and the kinds of models that are not
    supported.
    """
    args = trainer.args
    base = base_model(trainer.model)
    head: Any = None
    if hasattr(base, "get_output_embeddings"):
        head = base.get_output_embeddings()
    # Settings of the Trainer that would replace the loss or divide its sequences.
    if trainer.compute_loss_func is not None:
        yield "compute_loss_func is set, but the weighted loss takes its place: leave it out"
    liger = args.liger_kernel_config or {}
    has_liger_loss = liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")
    if args.use_liger_kernel and has_liger_loss:
        yield (
            "use_liger_kernel is set with losses of Liger: set fused_linear_cross_entropy and "
            "cross_entropy to False"
        )
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    if parallelism is not None and (
        parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False)
    ):
        yield (
            "context or sequence parallelism is on, but weights need whole sequences: set cp_size "
            "and sp_size to 1"
        )
    if args.n_gpu > 1:
        yield (
            f"one process would use {args.n_gpu} GPUs by DataParallel: start one for each GPU by "
            "accelerate launch"
        )
    # Kinds of models.
    config = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False) or head is None:
        yield (
            f"{type(base).__name__} is an encoder-decoder model or has no output layer over a "
            "vocabulary"
        )
    if fused_head:
        if "logits_to_keep" not in inspect.signature(base.forward).parameters:
            yield f"set fused_head to False: {type(base).__name__} has no argument logits_to_keep"
        if trainer.is_fsdp_enabled or isinstance(head.weight, DTensor):
            yield "set fused_head to False: the output layer is sharded over processes"
        if type(head) is not nn.Linear:  # with an adapter, or quantized
            yield (
                "set fused_head to False: the output layer is a "
                f"{type(head).__module__}.{type(head).__name__}, not a plain Linear"
            )
        text_config = base.config.get_text_config()
        if getattr(text_config, "final_logit_softcapping", None) is not None:
            yield f"set fused_head to False: {type(base).__name__} caps its logits"


class TokenWeightingMixin(_Trainer):  # type: ignore[misc]
    r"""Trains a causal language model on weighted cross-entropy; to be put before a subclass of
    ``Trainer``.

    .. math::
        \mathcal{L} = -\frac{1}{M} \sum_i w_i \log P(x_i | x_{<i})

    with M the tokens to predict in all mini-batches and on all processes of an optimizer step, and
    the weights of each mini-batch. Uniform weights give the loss of the Trainer itself.

        class MyWeightedTrainer(TokenWeightingMixin, MyTrainer): ...

    Evaluation and prediction are those of the Trainer. The state of the weighting is in the
    Trainer's checkpoints, for each process. The logs get ``cross_entropy``, the unweighted loss,
    and ``weight_mean``, ``weight_std`` and ``weight_max`` over the tokens since the last log. If
    the batches have ``position_ids``, a document begins wherever they start again. The special
    tokens of ``processing_class`` are passed to the weighting. A weighting that counts all tokens
    gets ``input_ids`` where ``attention_mask`` is not 0; without a mask all of them. From the
    second epoch on, batches are no ``first_pass``, see :class:`~tfidf_tune.weighting.TokenBatch`.

    Args:
        *args (Any): those of the Trainer.
        weighting (TokenWeighting | None): gives the weights. Default: None,
            :class:`TFIDFWeighting`.
        fused_head (bool): whether to compute the loss from hidden states and output layer, so that
            only a fraction of the logits exists at a time. The model has to support
            ``logits_to_keep``, compute the logits by a plain ``torch.nn.Linear`` and not be
            sharded. The outputs have the logits of the last position only. Default: False.
        **kwargs (Any): those of the Trainer.

    Raises:
        ValueError: If an argument is not valid, or the Trainer has a setting that would be ignored
            or a model that cannot be trained this way.
    """

    _is_first_batch = True

    def __init__(
        self,
        *args: Any,
        weighting: TokenWeighting | None = None,
        fused_head: bool = False,
        **kwargs: Any,
    ) -> None:
        # One chunk: logits of the whole mini-batch are contiguous, and slices of them would be
        # copied.
        if weighting is None:
            weighting = TFIDFWeighting()
        self._token_loss = WeightedCrossEntropyLoss(weighting, num_output_chunks=1)
        require_bool("fused_head", fused_head)
        training_arguments = kwargs.get("args")
        if not training_arguments and len(args) > 1:
            training_arguments = args[1]
        check_before_building(type(self), training_arguments)
        super().__init__(*args, **kwargs)
        for obstacle in obstacles(self, fused_head=fused_head):
            raise ValueError(obstacle)
        # The Trainer counts the tokens of a step, and does not divide by the number of
        # mini-batches, only with this.
        self._model_takes_num_items: bool = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs: bool = True
        self.weighting = weighting.to(self.args.device).train()
        self._first_state = copy.deepcopy(weighting.state_dict())
        tokenizer: Any = getattr(self.processing_class, "tokenizer", self.processing_class)
        if hasattr(tokenizer, "all_special_ids"):
            weighting.set_special_tokens(tokenizer.all_special_ids)
        self._fused_head = fused_head
        self._aux_factor = 0.0
        self._begin_anew()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss of a mini-batch as the Trainer does, of a model that returns the
        weighted loss.
        """
        # In training the Trainer gets a stand-in for the model, which it calls as it likes; in
        # evaluation the model.
        stand_in: Any = model
        if model.training and torch.is_grad_enabled():
            require_labels(inputs)
            is_first = self._is_first_batch
            if is_first:
                check_first_batch(inputs)
                # A batch in which no process has a label says nothing.
                has_labels = (inputs["labels"] != IGNORE_INDEX).any()
                counts = self.accelerator.gather(has_labels.int().reshape(1))
                is_first = not counts.any()
            config = getattr(self.model, "config", None)
            stand_in = _WeightedModel(model, config, self._weighted_outputs)
        elif not self._model_takes_num_items:
            num_items_in_batch = None
        result = super().compute_loss(
            stand_in,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
        )
        if isinstance(stand_in, _WeightedModel):
            # A base that never asked the model for its loss has ignored the weights.
            if not stand_in.is_used:
                raise ValueError(
                    f"a base of {type(self).__name__} computes the loss itself, without the weights"
                )
            self._is_first_batch = is_first
        return result

    def _weighted_outputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Call the model without labels, and set the weighted loss in its outputs."""
        num_items_in_batch = inputs.get("num_items_in_batch")
        loss_inputs = ("labels", "shift_labels", "num_items_in_batch")
        kept = {name: value for name, value in inputs.items() if name not in loss_inputs}
        logits: Any
        if self._fused_head:
            outputs, logits = self._call_for_head_input(model, kept)
            states = logits.hidden
        else:
            if self._is_first_batch:
                _check_loss(model, inputs)
            outputs = model(**kept)
            logits = getattr(outputs, "logits", None)
            states = logits
        if logits is None:
            raise ValueError(
                f"{type(self.model).__name__} returned no logits: switch off kernels with their "
                "own loss"
            )
        batch = self._token_batch(inputs, states.shape[1])
        terms = self._token_loss.terms(logits, batch)
        # The mean over this mini-batch becomes its part of the mean over the whole optimizer step.
        valid = batch.labels != IGNORE_INDEX
        self._weight_statistics.add(terms.cross_entropy, terms.weights, batch.labels)
        loss = terms.loss
        if num_items_in_batch is not None:
            loss = loss * (valid.sum() / num_items_in_batch)
        if getattr(outputs, "aux_loss", None) is not None:  # balances the experts of a mixture
            if self._is_first_batch:
                # Without labels, the model's own loss is nothing but the auxiliary loss times its
                # factor.
                no_labels = torch.full_like(batch.labels, IGNORE_INDEX)
                with _measured(model):
                    unweighted = model(**kept, labels=no_labels, num_items_in_batch=1)
                self._aux_factor = float(unweighted.loss / unweighted.aux_loss)
            loss = loss + self._aux_factor * outputs.aux_loss
        outputs["loss"] = loss
        return outputs

    def _token_batch(self, inputs: dict[str, Any], num_positions: int) -> TokenBatch:
        # The Trainer sets its epoch after each step.
        first_pass = not self.state.epoch or self.state.epoch < 1
        return token_batch(
            inputs, num_positions, needs_tokens=self.weighting.needs_tokens, first_pass=first_pass
        )

    def _call_for_head_input(
        self, model: nn.Module, inputs: dict[str, Any]
    ) -> tuple[Any, HeadInput]:
        """Call the model for the logits of the last position only; return its outputs and what
        logits are made of.
        """
        hidden_states: list[Tensor] = []
        # Not output_hidden_states: of every layer, which accelerate would convert to float32 under
        # autocast.
        hook = base_model(self.model).base_model.register_forward_hook(
            lambda _, __, output: hidden_states.append(output[0])
        )
        try:
            outputs = model(**inputs, logits_to_keep=1)
        finally:
            hook.remove()
        if not hidden_states:
            name = type(base_model(self.model)).__name__
            raise ValueError(
                f"set fused_head to False: {name} does not take its hidden states from its "
                "base_model"
            )
        layer = self.model.get_output_embeddings()
        dtype = _AUTOCAST.get(self.accelerator.mixed_precision, layer.weight.dtype)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        head = HeadInput(hidden_states[0].to(dtype), layer.weight.to(dtype), bias)
        # Once, the logits of the last position are compared: a model may do more to them than its
        # output layer.
        if self._is_first_batch:
            with torch.no_grad():
                expected = nn.functional.linear(head.hidden[:, -1:], head.weight, head.bias)
            tolerance = 1e-3 if dtype == torch.float32 else 2e-2
            if not torch.allclose(
                outputs.logits.float(), expected.float(), rtol=tolerance, atol=tolerance
            ):
                name = type(self.model).__name__
                raise ValueError(
                    f"set fused_head to False: the logits of {name} are not those of its output "
                    "layer"
                )
        return outputs, head

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # A training begins, perhaps again: auto_find_batch_size. A checkpoint is loaded later.
        self._begin_anew()
        return super()._inner_training_loop(*args, **kwargs)

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        """Make a new model, and put the weighting into its first state: trials of a search are
        independent.
        """
        if hasattr(self, "weighting"):  # not in the Trainer's constructor
            self._begin_anew()
        return super().call_model_init(*args, **kwargs)

    def _begin_anew(self) -> None:
        self.weighting.load_state_dict(self._first_state)
        self._weight_statistics = _WeightStatistics(self.args.device)
        self._is_first_batch = True

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the statistics of the weights together with the loss."""
        if "loss" in logs:  # every process logs it
            logs.update(self._weight_statistics.take(self.accelerator.gather))
        super().log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        os.makedirs(output_dir, exist_ok=True)  # the main process may not have been here yet
        state = {_CLASS: type(self.weighting).__name__, **self.weighting.state_dict()}
        torch.save(state, self._state_file(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = self._state_file(checkpoint)
        if not file.is_file():
            if self.weighting.state_dict():
                _logger.warning(
                    f"{checkpoint} has no {file.name}: the weighting begins with an empty state"
                )
            return
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises anything
            raise ValueError(
                f"{file} cannot be read ({type(error).__name__}): resume from another checkpoint, "
                "or remove the file"
            ) from error
        class_name = type(self.weighting).__name__
        saved = state.pop(_CLASS, class_name)
        if saved != class_name:
            raise ValueError(
                f"{checkpoint} was trained with {saved}, but this Trainer has {class_name}: resume "
                f"with {saved}, train in another folder, or remove {file} to go on with "
                f"{class_name} and an empty state"
            )
        # A state of other settings is an error that names them.
        self.weighting.load_state_dict(state)

    def _state_file(self, folder: str) -> Path:
        suffix = f"_{self.args.process_index}" if self.args.world_size > 1 else ""
        return Path(folder) / f"token_weighting{suffix}.pth"


@contextmanager
def _measured(model: nn.Module) -> Iterator[None]:
    """Call a model without gradients and without dropout, so that no random numbers are taken."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def _check_loss(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Raise a ``ValueError`` if the model's own loss is not the cross-entropy of
    the next tokens.
    """
    with _measured(model):
        kept = {name: value for name, value in inputs.items() if name != "num_items_in_batch"}
        outputs = model(**kept)
    loss = getattr(outputs, "loss", None)
    logits = getattr(outputs, "logits", None)
    if loss is None or logits is None or getattr(outputs, "aux_loss", None) is not None:
        return
    labels = shifted_labels(inputs, logits.shape[1])
    ours = token_cross_entropy(logits, labels).sum() / (labels != IGNORE_INDEX).sum()
    tolerance = 1e-4 if loss.dtype == torch.float32 else 1e-2  # both are of the same logits
    is_close = torch.isclose(
        loss.float(), ours.float(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    if not is_close:
        raise ValueError(
            f"the loss of {type(base_model(model)).__name__} is {loss:.4g}, the cross-entropy of "
            f"next tokens {ours:.4g}: weights are for causal language models"
        )


class _WeightedModel:
    """The model of a training step: called with labels it returns the weighted loss, else it is the
    model itself.
    """

    def __init__(
        self, model: nn.Module, config: Any, call: Callable[[nn.Module, dict[str, Any]], Any]
    ) -> None:
        self._model = model
        # Bases look for it in what Accelerate unwraps, but it would not unwrap DDP in here.
        self.config = config
        self._call = call
        self.is_used = False

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        if args or not has_labels(inputs):
            return self._model(*args, **inputs)
        self.is_used = True
        return self._call(self._model, inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _WeightStatistics:
    """Sums up cross-entropy and weights of mini-batches on the device; only :meth:`take` waits for
    it.
    """

    def __init__(self, device: torch.device) -> None:
        # The number of tokens, sums of cross-entropy, weights and their squared deviations; the
        # largest weight.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._sums = torch.zeros(5, dtype=dtype, device=device)

    def add(self, cross_entropy: Tensor, weights: Tensor, labels: Tensor) -> None:
        """Add a mini-batch: its mean cross-entropy, its weights and labels, both ``[b, s]``."""
        num_valid = (labels != IGNORE_INDEX).sum()
        total, deviations = weight_sums(weights, labels)
        self._sums[:4] += torch.stack([num_valid, cross_entropy * num_valid, total, deviations])
        self._sums[4] = torch.maximum(self._sums[4], weights.max())

    def take(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the statistics of all processes, joined by ``gather``, and start again; empty
        without a token.
        """
        sums_by_rank = gather(self._sums[None])
        num_valid, cross_entropy, total, deviations = sums_by_rank[:, :4].sum(0)
        largest = sums_by_rank[:, 4].max()
        self._sums = torch.zeros_like(self._sums)
        if num_valid == 0:
            return {}
        mean, std = weight_statistics(total, deviations, int(num_valid))
        statistics = {
            "cross_entropy": cross_entropy / num_valid,
            "weight_mean": mean,
            "weight_std": std,
            "weight_max": largest,
        }
        return {name: value.item() for name, value in statistics.items()}


class TokenWeightingTrainer(TokenWeightingMixin, Trainer):  # type: ignore[misc]
    """The Trainer of transformers with token weights: :class:`TokenWeightingMixin`
    put before it.
    """


def trainer_loss(loss: WeightedCrossEntropyLoss) -> Callable[..., Tensor]:
    """Make a ``compute_loss_func`` for a Trainer whose class cannot be changed.

    Labels are shifted, the sum over the tokens is divided by ``num_items_in_batch``, and evaluation
    is plain cross-entropy and leaves the weighting unchanged. Unlike with
    :class:`TokenWeightingMixin`, a row is one document, the state of the weighting is not in the
    checkpoints, nothing is added to the logs, and the weighting does not get the special tokens:
    call its :meth:`~tfidf_tune.weighting.TokenWeighting.set_special_tokens`.

    Args:
        loss (WeightedCrossEntropyLoss): the objective.

    Returns:
        Callable[..., Tensor]: called with outputs, labels ``[b, s]`` that are not shifted, and
        ``num_items_in_batch``.

    Raises:
        ValueError: If the weighting counts all tokens: the function gets only labels.
    """
    require_no_tokens(loss.weighting, "the Trainer")

    def compute_loss(
        outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        inputs = {"labels": labels}
        require_labels(inputs)
        labels = shifted_labels(inputs, outputs.logits.shape[1])
        num_valid = (labels != IGNORE_INDEX).sum()
        count = num_valid if num_items_in_batch is None else num_items_in_batch
        if torch.is_grad_enabled():
            return loss.terms(outputs.logits, labels).loss * (num_valid / count)
        return token_cross_entropy(outputs.logits, labels).sum() / count

    return compute_loss
