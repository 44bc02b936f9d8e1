"""The TF-IDF loss for torchtune's own recipes, without a change to them.

The stock recipes compare the *name* of the loss class: only one called ``CEWithChunkedOutputLoss``
gets chunks of logits and labels ``[b, s]``; for any other the labels are flattened, so that
sequences, which term frequencies need, are lost. And ``compile: True`` wraps the whole loss unless
it is a subclass of torchtune's. Hence name and base class.
"""

from functools import wraps
from typing import Any

import tfidf_tune._torchao

from torchtune.modules import loss as torchtune_loss

from tfidf_tune.loss._weighted import TFIDFCrossEntropyLoss
from tfidf_tune.weighting.token_weighting import require_no_tokens


class CEWithChunkedOutputLoss(TFIDFCrossEntropyLoss, torchtune_loss.CEWithChunkedOutputLoss):  # type: ignore[misc]
    """:class:`~tfidf_tune.loss.TFIDFCrossEntropyLoss` under the name that the stock recipes know.

    ``tune run full_finetune_single_device --config ...
    loss._component_=tfidf_tune.loss.stock.CEWithChunkedOutputLoss``

    The arguments are those of :class:`~tfidf_tune.loss.TFIDFCrossEntropyLoss`.

    Raises:
        ValueError: If an argument is out of its range, or ``counted`` is ``tokens``, which stock
            recipes do not pass.
    """

    @wraps(TFIDFCrossEntropyLoss.__init__)  # type: ignore[misc]
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        require_no_tokens(self.weighting, "a stock recipe of torchtune")
