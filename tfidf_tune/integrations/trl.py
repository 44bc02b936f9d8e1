"""Token weightings in the SFTTrainer of TRL.

    from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer

    # TF-IDF; or weighting=GoldfishWeighting()
    trainer = TokenWeightingSFTTrainer("model", train_dataset=dataset)

TRL's loss is the sum of the log-probabilities of the labels, which the model returns without ever
holding all logits. They are multiplied by the weights on their way to it, so that everything else
is TRL's own.
"""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import nn
from trl import SFTTrainer

from tfidf_tune.integrations.transformers import TokenWeightingMixin
from tfidf_tune.weighting import IGNORE_INDEX, Predictions, TokenWeighting

__all__ = ["TokenWeightingSFTTrainer"]


class TokenWeightingSFTTrainer(TokenWeightingMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer with token weights, see
    :class:`~tfidf_tune.integrations.transformers.TokenWeightingMixin`.

    Padded, packed and padding-free batches, completions only, PEFT: all that SFTTrainer does with
    ``loss_type="nll"``. A class of your own derived from SFTTrainer gets the weights by::

        class MyWeightedTrainer(TokenWeightingSFTTrainer, MySFTTrainer): ...

    Args:
        *args (Any): those of SFTTrainer.
        weighting (TokenWeighting | None): gives the weights. Default: None,
            :class:`TFIDFWeighting`.
        **kwargs (Any): those of SFTTrainer.

    Raises:
        ValueError: If an argument is not valid, or a setting of SFTTrainer would be ignored.
    """

    def __init__(self, *args: Any, weighting: TokenWeighting | None = None, **kwargs: Any) -> None:
        if "fused_head" in kwargs:
            raise ValueError(
                "fused_head is for transformers' Trainer: SFTTrainer never holds all logits, leave "
                "it out"
            )
        super().__init__(*args, weighting=weighting, **kwargs)
        if self.weighting.needs_tokens and self.padding_free and self.args.pad_to_multiple_of:
            raise ValueError(
                f"pad_to_multiple_of is {self.args.pad_to_multiple_of}, and its padding would be "
                "counted as tokens: set it to None, or counted to 'labels'"
            )

    def _weighted_outputs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Call the model, and multiply the log-probabilities in its outputs by the weights."""
        if not inputs.get("fused_lm_head"):  # older releases take the loss from the model
            return super()._weighted_outputs(model, inputs)
        # TRL's model returns log-probabilities and entropies of all but the last position instead
        # of logits.
        outputs = model(**inputs)
        log_probs = outputs.log_probs
        num_predicted = log_probs.shape[1]
        batch = self._token_batch(inputs, num_predicted + 1)
        predictions = Predictions(log_probs.detach().float(), outputs.entropy.detach().float())
        if batch.all_tokens is None:
            documents = batch.document_ids
            if documents is not None:
                documents = documents[:, :-1]
            batch = replace(batch, labels=batch.labels[:, :-1], document_ids=documents)
        else:  # the first token is at the last position
            predictions = Predictions(*(F.pad(values, (0, 1)) for values in predictions))
        # Weights of the predicted positions; TRL sums the log-probabilities and divides as ever.
        # The output layer may be sharded.
        vocab_size = self.model.config.get_text_config().vocab_size
        batch = replace(batch, vocab_size=vocab_size, predictions=predictions)
        weights = self.weighting(batch)[:, :num_predicted]
        labels = batch.labels[:, :num_predicted]
        num_valid = (labels != IGNORE_INDEX).sum().clamp_min(1)
        cross_entropy = -predictions.log_probability.sum() / num_valid
        self._weight_statistics.add(cross_entropy, weights, labels)
        outputs["log_probs"] = log_probs * weights
        return outputs
