"""Any causal language model of transformers behind the interface of torchtune's decoders."""

import re
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtune.modules import TiedLinear
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from tfidf_tune._checks import cache_argument


def build_hf(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build transformers' own model of a config, randomly initialised, with options of its
    ``from_config``.
    """
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, trust_remote_code=has_own_code(config), **options
    )
    return model


def has_own_code(config: PreTrainedConfig) -> bool:
    """Return whether a config was read by code of its checkpoint, which only trusted
    code can be.
    """
    return type(config).__module__.startswith("transformers_modules.")


class HFCausalLM(nn.Module):
    """A causal language model of transformers, called and taken apart as a torchtune
    ``TransformerDecoder``.

    The output layer is called outside of transformers' model, so that a loss may take the hidden
    states instead of logits. A model that does more to its logits than scale them, such as Gemma
    2's soft cap, keeps its output layer.

    Args:
        hf (PreTrainedModel): the model, with LoRA layers of PEFT or without; it is changed.
        max_seq_len (int): longest sequence.
        peft_config (LoraConfig | None): settings of the LoRA layers. Default: None, no such layers.

    Attributes:
        hf (PreTrainedModel): the model, without its output layer if :attr:`output` is one.
        output (Any): the output layer, a ``TiedLinear`` where it shares the weights of the
            embedding. None if the model keeps it.
        layer_names (tuple[str, ...]): names of the decoder layers.
        num_output_chunks (int): see torchtune's ``TransformerDecoder``; 0 for logits in one piece.
    """

    def __init__(self, hf: PreTrainedModel, max_seq_len: int, peft_config: Any = None) -> None:
        super().__init__()
        self.hf = hf
        self.peft_config = peft_config
        self.max_seq_len = max_seq_len
        self.num_output_chunks = 0
        self.layer_names = tuple(f"hf.{name}" for name in _decoder_layers(hf))
        self._cache = cache_argument(hf)
        self._packs_by = "positions"
        # Take the output layer out of the model, where the logits are nothing but its output.
        head: Any = hf.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(hf).__name__} has no output layer over the vocabulary")
        self._head_name = next(name for name, module in hf.named_modules() if module is head)
        embeddings: Any = hf.get_input_embeddings()
        is_tied = head.weight is embeddings.weight
        self.output: Any = None
        if _scales_logits_only(hf, self._head_name) and not (is_tied and head.bias is not None):
            self.output = TiedLinear(embeddings) if is_tied else head
            hf.set_submodule(self._head_name, nn.Identity())
        elif is_tied:
            hf.set_submodule(self._head_name, _TiedHead(embeddings, head.bias))
        # Sharding and checkpoints take each weight for one layer's.
        first_names = {name for name, _ in hf.named_parameters()}
        all_names = [name for name, _ in hf.named_parameters(remove_duplicate=False)]
        shared = [name for name in all_names if name not in first_names]
        if shared:
            raise ValueError(
                f"{type(hf).__name__} has layers that share weights ({shared[0]}), which is not "
                "supported"
            )

    @property
    def tok_embeddings(self) -> Any:
        """Return the embedding of the tokens."""
        return self.hf.get_input_embeddings()

    @property
    def layers(self) -> list[nn.Module]:
        """Return the decoder layers, with the wrappers that they may have got."""
        return [self.get_submodule(name) for name in self.layer_names]

    def set_num_output_chunks(self, num_output_chunks: int) -> None:
        """Make the model return a list of this many chunks of logits, see torchtune's
        ``TransformerDecoder``.
        """
        self.num_output_chunks = num_output_chunks

    def chunked_output(self, hidden: Tensor) -> list[Tensor]:
        """Return logits of hidden states ``[b, s, d]`` in chunks along the sequence."""
        chunks = hidden.tensor_split(self.num_output_chunks, dim=1)
        return [self.output(chunk) for chunk in chunks]

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Any = None,
        input_pos: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Any:
        """Run the model.

        Args:
            tokens (Tensor): int64 ``[b, s]``.
            mask (Any): ignored: transformers makes the mask from the positions.
            input_pos (Tensor | None): int64 ``[b, s]``, from 0 in each document of a packed row.
                Default: None.
            past_key_values (Cache | None): a KV cache, which gets the states of the tokens.
                Default: None.

        Returns:
            Any: logits ``[b, s, v]``, a list of chunks of them, or what ``chunked_output`` was
                replaced by.
        """
        # Some models lack an argument: it is given only where it is needed.
        arguments: dict[str, Any] = {}
        if input_pos is not None:
            arguments["position_ids"] = input_pos
            if self._packs_by == "mask":
                arguments["attention_mask"] = self._mask(input_pos)
        if past_key_values is not None:
            arguments[self._cache] = past_key_values
        has_cache = past_key_values is not None
        hidden: Tensor = self.hf(input_ids=tokens, use_cache=has_cache, **arguments).logits
        # A model that keeps its output layer returned logits.
        if self.output is None:
            if self.num_output_chunks == 0:
                return hidden
            return list(hidden.tensor_split(self.num_output_chunks, dim=1))
        if self.num_output_chunks == 0:
            return self.output(hidden).float()
        return self.chunked_output(hidden)

    def _mask(self, input_pos: Tensor) -> Tensor:
        """Return a mask ``[b, 1, s, s]`` of positions ``[b, s]``: 0 within a document, very
        negative elsewhere.
        """
        documents = (input_pos == 0).cumsum(dim=1)
        may_attend = (documents[:, :, None] == documents[:, None]).tril()[:, None]
        mask = torch.zeros(
            may_attend.shape, dtype=self.tok_embeddings.weight.dtype, device=input_pos.device
        )
        return mask.masked_fill(~may_attend, torch.finfo(mask.dtype).min)

    def check_causality(self) -> None:
        """Raise a ValueError if logits depend on later tokens.

        The model has its weights and is in eval mode. Every process of a sharded model has to call.
        """
        tokens = self._sample(10)
        changed = tokens.clone()
        changed[:, -1] = tokens[:, 0]
        logits = self._logits(torch.cat([tokens, changed]))
        if not _are_equal(logits[:, :-1]):
            raise ValueError(
                f"{type(self.hf).__name__} sees the tokens that it has to predict: name a causal "
                "model"
            )

    def check_packing(self) -> None:
        """Find out how documents of packed rows are kept apart: by the positions in most models, in
        others by a mask.

        A ValueError is raised if neither does; otherwise as :meth:`check_causality`.
        """
        # Two documents in two packed rows, which differ in the first document alone; and each
        # document in its own row.
        tokens = self._sample(10)
        behind_another = torch.cat([tokens[:, 4:8], tokens[:, 4:]], dim=1)
        rows = torch.cat([tokens, behind_another])
        positions = torch.cat([torch.arange(4), torch.arange(6)]).expand(2, -1).to(tokens.device)
        first_alone = self._logits(tokens[:, :4])
        second_alone = self._logits(tokens[:, 4:])
        alone = torch.cat([first_alone, second_alone], dim=1)
        config: Any = self.hf.config
        window = getattr(config, "sliding_window", None) or self.max_seq_len
        # A mask would replace the window of layers that have one.
        layer_types = set(getattr(config, "layer_types", None) or ["windows"])
        has_windows = layer_types != {"full_attention"} and window < self.max_seq_len
        ways = ("positions",) if has_windows else ("positions", "mask")
        tolerance = max(1e-3, 4 * torch.finfo(self.tok_embeddings.weight.dtype).eps)
        for self._packs_by in ways:
            try:
                packed = self._logits(rows, positions)
            except (TypeError, ValueError, RuntimeError):
                continue  # no such argument, or a mask of another shape
            # The second document must not see the first, and both must have the logits that they
            # have alone.
            differences = (packed[:1] - alone).abs().max() / alone.abs().max()
            if _are_equal(packed[:, 4:]) and differences <= tolerance:
                return
        raise ValueError(
            f"{type(self.hf).__name__} cannot keep the documents of packed rows apart: use rows "
            "unpacked"
        )

    def _sample(self, num_tokens: int) -> Tensor:
        device = next(self.parameters()).device
        tokens = torch.arange(1, num_tokens + 1, device=device)[None]
        return tokens % int(self.tok_embeddings.num_embeddings)

    @torch.no_grad()
    def _logits(self, tokens: Tensor, input_pos: Tensor | None = None) -> Tensor:
        """Return logits in one piece."""
        num_chunks = self.num_output_chunks
        self.num_output_chunks = 0
        try:
            logits: Tensor = self(tokens, input_pos=input_pos).float()
        finally:
            self.num_output_chunks = num_chunks
        return logits

    def hf_name(self, name: str) -> str:
        """Return the name that transformers has for a parameter or buffer of this model, also of a
        layer with LoRA.
        """
        if name.startswith("output."):
            return f"{self._head_name}.{name.removeprefix('output.')}"
        return name.removeprefix("hf.").replace(".base_layer.", ".")


def _are_equal(logits: Tensor) -> bool:
    """Return whether the logits of two rows ``[2, s, v]`` of one batch are equal."""
    # The same operations on the same shapes give the same bits, but for a mixture of experts (5e-7
    # of the largest).
    difference = (logits[0] - logits[1]).abs().max()
    return bool(difference <= 1e-4 * logits.abs().max())


def linear_layers(hf: PreTrainedModel) -> tuple[dict[str, bool], list[str]]:
    """Return names of linear layers within a decoder layer, with whether they are of an attention,
    and all names.
    """
    # An attention is known by its name or, as in RecurrentGemma's `temporal_block`, by its class.
    kinds: dict[str, bool] = {}
    names = []
    for layer in _decoder_layers(hf):
        modules = dict(hf.get_submodule(layer).named_modules(prefix="layer"))
        attentions = tuple(
            f"{path}."
            for path, module in modules.items()
            if type(module).__name__.endswith("Attention")
        )
        for path, module in modules.items():
            if not isinstance(module, (nn.Linear, Conv1D)):
                continue
            name = path.removeprefix("layer.")
            has_attention_name = re.match(r"\w*(attn|attention)\b", name) is not None
            is_in_attention = has_attention_name or path.startswith(attentions)
            kinds[name] = kinds.get(name, False) or is_in_attention
            names.append(f"{layer}.{name}")
    return kinds, names


def _decoder_layers(hf: PreTrainedModel) -> list[str]:
    """Return the names of the decoder layers: what transformers never splits over devices, or the
    longest list.
    """
    # Experts and vision towers have lists too; of layers within layers the outer ones count.
    undivided = hf._no_split_modules or ()
    names = [name for name, module in hf.named_modules() if type(module).__name__ in undivided]
    if not names:
        lists = {
            name: module for name, module in hf.named_modules() if isinstance(module, nn.ModuleList)
        }
        if not lists:
            raise ValueError(f"{type(hf).__name__} has no list of decoder layers")
        longest = max(lists, key=lambda name: len(lists[name]))
        names = [f"{longest}.{index}" for index in range(len(lists[longest]))]
    outer = tuple(f"{name}." for name in names)
    return [name for name in names if not name.startswith(outer)]


class _OnlyHidden(BaseModelOutput):  # type: ignore[misc]
    """The output of any decoder: hidden states, and None for all else."""

    def __getattr__(self, name: str) -> None:
        return None


def _scales_logits_only(hf: PreTrainedModel, head_name: str) -> bool:
    """Return whether the model's logits are the output layer's, perhaps times a number."""
    # The decoder is replaced by made-up hidden states and the output layer by the identity.
    decoder: Any = hf.get_decoder()
    head = hf.get_submodule(head_name)
    with torch.device("cpu"):
        hidden = torch.linspace(-100, 100, 64).reshape(1, 4, 16)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
    hf.set_submodule(head_name, nn.Identity())
    decoder.forward = lambda *_, **__: _OnlyHidden(last_hidden_state=hidden)
    try:
        ratio = hf(input_ids=tokens, use_cache=False).logits / hidden
    except Exception:  # of a model that takes more from its decoder or output layer
        return False
    finally:
        del decoder.forward
        hf.set_submodule(head_name, head)
    return torch.allclose(ratio, ratio[0, 0, 0].expand_as(ratio))


class _TiedHead(nn.Module):
    """An output layer within transformers' model that has the weight of the embedding, but not as a
    parameter.
    """

    def __init__(self, embeddings: Any, bias: nn.Parameter | None) -> None:
        super().__init__()
        self._embeddings = [embeddings]  # in a list, which does not make it a submodule
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self._embeddings[0].weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)
