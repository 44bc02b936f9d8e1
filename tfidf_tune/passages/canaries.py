"""Canaries: passages in rows of a user's own data set, after "The Secret Sharer" (Carlini et al.
2019).

Inserted text is compared with text drawn in the same way but not inserted
(https://arxiv.org/abs/1802.08232).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfidf_tune._checks import check_at_least
from tfidf_tune._tokenizer import HFTokenizer, check_fits_model, encode_texts
from tfidf_tune.corpus.sources import EMBEDDED, embedded_documents
from tfidf_tune.passages.arrival import (
    CanaryCheck,
    CanarySearch,
    Circumstances,
    check_trainer,
    length_of,
    search_batches,
    unchanged_random_state,
)
from tfidf_tune.passages.copies import draw_slots
from tfidf_tune.passages.probe_file import Passage, PassageDraft, make_passages, write_probe_file
from tfidf_tune.passages.stretches import SHARED_TOKENS, WindowChooser, join_documents

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer


class InjectedCanaries:
    """Canaries for a data set of ``datasets``, and the probe file that measures how much a model
    recites of them.

    Targets are inserted as rows of their own, ``repeats`` times each, at random places; controls
    are not inserted. Both are drawn from the same text and divided at random, so that what a model
    recites of the controls is what it knows without having seen them in training.

    Unless ``texts`` are given, a canary is ``block_size`` tokens of :func:`embedded_documents`. It
    neither starts nor ends with white space, and its text has exactly the token ids of the probe
    file, after the BOS of the pipeline if it adds one. No two of these have 50 tokens in a row in
    common. A canary that a row of the column contains as a whole is replaced by another one. All is
    a function of the arguments and the data set.

    Args:
        tokenizer (PreTrainedTokenizerBase): the tokenizer of the pipeline, as ``transformers`` has
            loaded it.
        num_targets (int): canaries to insert. Default: 20
        num_controls (int | None): canaries that are not inserted. Default: None, as many as targets
        repeats (int | Sequence[int]): insertions of each target; several numbers, such as ``(1, 4,
            16)``, are given to the targets by turns. ``num_injections`` of the probe file tells
            them apart. Default: 10
        block_size (int): tokens of a canary of the embedded text. The probe prompts with up to 100
            of them, and a pipeline must not truncate them. Default: 256
        texts (Sequence[str] | None): your own canaries, each as it stands, of which ``num_targets +
            num_controls`` are drawn. Default: None, the embedded text
        is_random (bool): whether ``texts`` were drawn at random, as tokens or digits are. An audit
            then judges membership by Min-K%++, which finds such text best. Default: False, natural
            text
        seed (int): decides which canaries are drawn, which are targets, and where they are
            inserted. Default: 0

    Attributes:
        passages (list[Passage]): targets, then controls; empty before :meth:`inject`. The
            ``positions`` of a target are ``[row, 0]`` in the returned data set.

    Raises:
        ValueError: If a number is out of range, a canary would be longer than the tokenizer's
            ``model_max_length``, there are too few ``texts``, one is part of another or has only
            one token, ``is_random`` is set without them, or the tokenizer is none of
            ``transformers`` or has no EOS token.

    Example:
        >>> canaries = InjectedCanaries(tokenizer, num_targets=20, repeats=10, seed=0)
        >>> train_dataset = canaries.inject(dataset, column="text")
        >>> canaries.write_probe_file("probe.jsonl")
        >>> print(canaries.check(trainer))  # before trainer.train()
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        num_targets: int = 20,
        num_controls: int | None = None,
        repeats: int | Sequence[int] = 10,
        block_size: int = 256,
        texts: Sequence[str] | None = None,
        is_random: bool = False,
        seed: int = 0,
    ) -> None:
        if not hasattr(tokenizer, "num_special_tokens_to_add"):
            kind = type(tokenizer).__name__
            raise ValueError(
                f"tokenizer is a {kind}: give what AutoTokenizer returns, or processor.tokenizer"
            )
        if is_random and texts is None:
            raise ValueError("is_random is for texts of your own: the embedded text is natural")
        numbers = list(repeats) if isinstance(repeats, Sequence) else [repeats]
        num_controls = num_targets if num_controls is None else num_controls
        for number in numbers or [0]:
            check_at_least(1, repeats=number)
        check_at_least(len(numbers), num_targets=num_targets)
        check_at_least(0, num_controls=num_controls, seed=seed)
        check_at_least(2, block_size=block_size)
        self._tokenizer = HFTokenizer(tokenizer, max_seq_len=tokenizer.model_max_length)
        self._special_ids = list(tokenizer.all_special_ids)
        length = {"block_size": block_size}
        if texts is not None:
            lengths = [len(ids) for ids in encode_texts(self._tokenizer, texts)]
            joined = "\0".join(texts)
            for index, text in enumerate(texts):
                if (
                    lengths[index] < 2 or joined.count(text) > 1
                ):  # within another text it would be counted with that
                    raise ValueError(
                        f"texts[{index}] is {text!r}: it needs 2 tokens, and to be no part of "
                        "another"
                    )
            length = {"the longest of texts": max(lengths, default=0)}
        special = tokenizer.num_special_tokens_to_add()
        check_fits_model(
            self._tokenizer, lower=" and ".join(length), special_tokens=special, **length
        )
        self._repeats = np.resize(numbers, num_targets)
        self._num_canaries = num_targets + num_controls
        self._texts = texts
        self._is_random = is_random
        self._block_size = block_size
        self._seed = seed
        self.passages: list[Passage] = []

    def inject(
        self, dataset: "Dataset", column: str = "text", row: Mapping[str, Any] | None = None
    ) -> "Dataset":
        """Insert the targets.

        Args:
            dataset (Dataset): the training data, one split.
            column (str): the column of text that the pipeline trains on. With prompts and
                completions it is ``"completion"``, and ``row={"prompt": ""}``. Default: "text"
            row (Mapping[str, Any] | None): values of the inserted rows in other columns. Default:
                None, each is None

        Returns:
            Dataset: the rows of ``dataset`` in their order, with the targets among them, and its
                features.

        Raises:
            ValueError: If ``dataset`` is no ``datasets.Dataset``, ``column`` does not exist or
                holds no text, ``row`` names an unknown column, there are too few canaries whose
                text the column does not contain, or this is the second call.
        """
        from datasets import Dataset, concatenate_datasets

        values = dict(row or {})
        kind = dataset.features.get(column) if isinstance(dataset, Dataset) else None
        if getattr(kind, "dtype", "") not in ("string", "large_string"):
            raise ValueError(
                f"canaries need a datasets.Dataset with a column {column!r} of text; this "
                f"{type(dataset).__name__} has {getattr(dataset, 'features', None)}"
            )
        unknown = sorted(values.keys() - ({*dataset.column_names} - {column}))
        if unknown:
            raise ValueError(
                f"row gives values for {unknown}, which are no other columns of "
                f"{dataset.column_names}"
            )
        if self.passages:
            raise ValueError(
                "inject() was called before: make another InjectedCanaries for another data set"
            )
        # One row for each target, of which the final selection takes as many copies as are wanted.
        texts = self._draw(dataset, column)
        targets = texts[: len(self._repeats)]
        columns = {name: [values.get(name)] * len(targets) for name in dataset.column_names} | {
            column: targets
        }
        rows = Dataset.from_dict(columns, features=dataset.features, split=dataset.split)
        # The number of the target of each.
        copies = np.repeat(np.arange(len(targets)), self._repeats)
        slots = draw_slots(len(dataset), len(copies), 1, self._seed)
        order = np.append(np.arange(len(dataset)), len(dataset) + copies)[np.argsort(slots)]
        source = EMBEDDED if self._texts is None else "texts"
        fields = {"is_random": True} if self._is_random else {}
        drafts: list[PassageDraft] = []
        for number, ids in enumerate(encode_texts(self._tokenizer, texts)):
            places = np.sort(slots[len(dataset) :][copies == number])
            positions = [[place, 0] for place in places.tolist()]
            drafts.append(PassageDraft(ids, positions, source, fields))
        self.passages = make_passages(self._tokenizer, drafts, len(targets))
        return concatenate_datasets([dataset, rows]).select(order)

    def write_probe_file(self, path: str | Path) -> None:
        """Write the passages for the monitor and for audits, see :func:`write_probe_file`; needs
        :meth:`inject`.
        """
        if not self.passages:
            raise ValueError("there are no canaries yet: call inject() before write_probe_file()")
        write_probe_file(path, self.passages)

    def check(self, trainer: "Trainer", *, loss_share: float = 1.0) -> CanaryCheck:
        """Check before training that a trainer learns the targets, and that no control is in its
        data.

        The batches that the trainer makes for its first epoch are read once, without the model, up
        to the last one that it trains on: packed, truncated and with labels as they are in
        training. Then the model computes the gradient of one target. Training is not changed by it:
        random states are put back, and gradients are not kept. With several processes all of them
        have to call this, and what they see is added up.

        Args:
            trainer (Trainer): a ``Trainer`` of transformers, or one derived from it, such as TRL's
                ``SFTTrainer``, before ``train()``.
            loss_share (float): least share of a target's tokens that have loss. Less than 1 is for
                data collators that leave tokens out on purpose. Default: 1.0

        Returns:
            CanaryCheck: what was seen; can be printed.

        Raises:
            ValueError: If a target arrives less often than it was inserted, because it is left out,
                cut, split over rows or has other token ids; if it gets no loss, or no trainable
                parameter a gradient from it; if a control is in the data; if labels are shifted
                already; or if the data are a stream that cannot be read twice.
        """
        return check_trainer(trainer, self._inserted(), self._special_ids, loss_share=loss_share)

    def check_batches(
        self,
        batches: Iterable[Mapping[str, Any]],
        *,
        model: Any = None,
        max_batches: int | None = None,
        loss_share: float = 1.0,
    ) -> CanaryCheck:
        """Check the batches of a training loop of your own, as :meth:`check` does those of a
        trainer.

        Args:
            batches (Iterable[Mapping[str, Any]]): the batches of one epoch, of all processes: a
                data loader, say, whose random state is put back. Each has ``input_ids`` and
                ``labels``, shifted or not; ``attention_mask`` and ``position_ids`` are used if
                there are any.
            model (Any): the model, if its gradient is to be checked, before FSDP or DeepSpeed
                wraps it. Default: None
            max_batches (int | None): batches to read at most; needed if ``batches`` has no length,
                as a stream. Default: None, all
            loss_share (float): as for :meth:`check`. Default: 1.0

        Returns:
            CanaryCheck: what was seen; can be printed.

        Raises:
            ValueError: As :meth:`check`, and if ``batches`` has no length and ``max_batches`` is
                None.
        """
        search = CanarySearch(self._inserted(), self._special_ids, loss_share)
        if max_batches is not None:
            check_at_least(1, max_batches=max_batches)
        elif length_of(batches) is None:
            raise ValueError(
                f"batches is a {type(batches).__name__} without a length, which may never end: "
                "set max_batches to the number of batches of an epoch"
            )
        with unchanged_random_state():
            search_batches(search, batches, max_batches, may_be_shifted=True)
            return search.result(Circumstances(), model, nullcontext())

    def _inserted(self) -> list[Passage]:
        """Return the passages, which are there after :meth:`inject`."""
        if not self.passages:
            raise ValueError("there are no canaries yet: call inject() before a check")
        return self.passages

    def _draw(self, dataset: "Dataset", column: str) -> list[str]:
        """Draw canaries that the column does not contain, in random order."""
        rng = np.random.default_rng(self._seed)
        candidates = self._candidates(rng)
        drawn: list[str] = []
        # The data set is read once for each round, in which those that it contains are replaced.
        while more := list(islice(candidates, self._num_canaries - len(drawn))):
            for batch in dataset.select_columns([column]).with_format(None).iter(batch_size=1000):
                joined = "\0".join(text or "" for text in batch[column])
                more = [text for text in more if text not in joined]
            drawn += more
        if len(drawn) < self._num_canaries:
            raise ValueError(
                f"num_targets + num_controls is {self._num_canaries}, but there are only "
                f"{len(drawn)} texts or passages that the column {column!r} does not contain: "
                "lower these numbers"
            )
        # Shuffled, because a passage must not overlap those that were drawn before it.
        return [drawn[index] for index in rng.permutation(len(drawn))]

    def _candidates(self, rng: np.random.Generator) -> Iterator[str]:
        """Draw texts, or passages without overlap of which the embedded text repeats no long
        stretch.
        """
        if self._texts is not None:
            yield from (self._texts[index] for index in rng.permutation(len(self._texts)))
            return
        tokenizer = self._tokenizer
        length = self._block_size
        documents = embedded_documents("train") + embedded_documents("validation")
        chooser = WindowChooser(
            tokenizer, join_documents(encode_texts(tokenizer, documents)), length, rng
        )
        for start in chooser.unique(min(SHARED_TOKENS, length)):
            # A token can differ at the start of a text: byte-level tokenizers have another one
            # without the space.
            text = tokenizer.decode(chooser.window(start).tolist()).strip()
            if len(tokenizer.encode(text, add_bos=False, add_eos=False)) == length:
                yield text
