"""What the recipes have to know of a model family to read and write its Hugging Face checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

StateDict = dict[str, Tensor]
HFConfig = Mapping[str, Any]


class ModelFamily(ABC):
    """Translation between torchtune's names and shapes and those of one Hugging Face architecture.

    Conversions go by key, so that a state dict may be handed over in parts (shard by shard); they also work on meta
    tensors, which is how a checkpoint is compared with a model before anything is loaded.
    """

    @abstractmethod
    def hf_to_tune(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert (a part of) a Hugging Face state dict to torchtune's names and layout.

        Raises:
            ValueError: If a key is not one of the architecture; the message names it.
        """

    @abstractmethod
    def tune_to_hf(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert (a part of) a torchtune state dict to Hugging Face's names and layout."""

    @abstractmethod
    def tune_to_peft(self, state_dict: StateDict, config: HFConfig) -> StateDict:
        """Convert LoRA adapter weights to the names and layout of a PEFT adapter file."""

    @abstractmethod
    def peft_target_modules(self, module_names: Iterable[str]) -> list[str]:
        """Translate torchtune's names of linear layers (``output_proj``) into the architecture's (``o_proj``)."""

    @abstractmethod
    def settings(self, model: nn.Module, config: HFConfig) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, value in the checkpoint, value in the model) of settings that shapes alone do not show."""
