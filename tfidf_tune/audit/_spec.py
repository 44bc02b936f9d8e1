"""What an audit is asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tfidf_tune._checks import check_at_least, require_base_url, require_choice, require_no_options
from tfidf_tune._files import looks_like_path, require_model_folder
from tfidf_tune._printing import option_names
from tfidf_tune.probe.attacks import PREFIX_LENGTHS

if TYPE_CHECKING:
    from tfidf_tune.corpus import TaskRunner
    from tfidf_tune.passages import ProbeSpec

# Settings that have an effect on a single attack.
_ATTACK_OF_SETTING = {
    "offsets": "offset",
    "prompt_noise": "noise",
    "num_samples": "sampling",
    "temperature": "sampling",
    "top_k": "sampling",
}


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """An OpenAI-compatible server that answers for the model.

    Args:
        base_url (str): up to ``/v1``.
        send (Literal["text", "ids"]): prompts as text, or as token ids. Default: "text".
        api_key_variable (str): environment variable with the API key. Default: "OPENAI_API_KEY".
        num_concurrent (int): requests at once. Default: 1.
        requests_per_minute (float | None): most requests. Default: None, no limit.
        timeout (float): seconds to wait for an answer. Default: 600.
        max_retries (int): of a request that fails. Default: 8.
    """

    base_url: str
    send: Literal["text", "ids"] = "text"
    api_key_variable: str = "OPENAI_API_KEY"
    num_concurrent: int = 1
    requests_per_minute: float | None = None
    timeout: float = 600.0
    max_retries: int = 8

    def __post_init__(self) -> None:
        require_base_url(self.base_url)
        require_choice("send", self.send, ("text", "ids"))


@dataclass(frozen=True, kw_only=True)
class AuditSpec:
    """What to audit: a model, the passages that it is asked for, how it is asked, and which limits
    it must keep.

    Args:
        model (str): a Hugging Face model or PEFT adapter, a folder or hub id; behind a server its
            name there.
        passages (ProbeSpec | str | Path): texts to choose passages from, or a probe file.
        tokenizer (str | None): folder or hub id; a model behind a server needs it. Default: None,
            the model's.
        server (ServerSpec | None): answers for the model. Default: None, the model is loaded here.
        backend (Literal["transformers", "vllm"]): what runs a model that is loaded. Default:
            "transformers".
        base (str | None): model under an adapter. Default: None, what the adapter names.
        device (str | None): default: None, a GPU if there is one.
        dtype (str | None): "float32", "bfloat16", ... Default: None, the checkpoint's.
        model_args (dict[str, Any]): more arguments of the harness's model, ``hf`` or ``vllm``.
        reference (str | None): the model before training, whose likelihoods are compared. Default:
            None.
        attacks (Sequence[str] | None): ways of asking, see
            :func:`tfidf_tune.probe.planned_attacks`. Default: None, greedy ones, which the report
            then does not name.
        prefix_lengths (Sequence[int]): tokens of the prompts. Default: 32, 50, 100.
        max_new_tokens (int): tokens of a continuation. Default: 128.
        offset (int): token of a passage where greedy prompts start, without ``attacks``. Default:
            0.
        offsets (Sequence[int]): of the attack "offset". Default: 64, 96.
        prompt_noise (float): replaced share of a prompt, of the attack "noise". Default: 0.1.
        num_samples (int): of the attack "sampling". Default: 10.
        temperature (float): of the attack "sampling". Default: 1.
        top_k (int): of the attack "sampling", 0 for all tokens. Default: 0.
        budget (int | None): most requests, likelihoods and the positive control among them; attacks
            beyond it are left out. Default: None, no limit.
        bos (bool | None): whether BOS is before each prompt and passage of token ids. Default:
            None, as the model was trained, see ``docs/audit.md``.
        batch_size (int): sequences in a forward pass. Default: 64.
        output_dir (str | Path | None): folder of passages, answers and report. Default: None,
            ``runs/audit/NAME``.
        limits (str | None): measures and what they must not exceed,
            ``recited=0,extraction@0.01=0.02``, see :func:`parse_bounds`. Default: None, no limits.
        accept_unanswered (bool): limits can pass although a server withheld answers. Default:
            False.
        accept_unproven (bool): limits can pass although the positive control showed nothing.
            Default: False.
        show_passages (bool): show passages in full. Default: False, excerpts.
        overwrite (bool): choose the passages again if the folder has some. Default: False.
        runner (TaskRunner | None): where tasks on files of text run. Default: None, this process.

    Raises:
        ValueError: If values are out of range, or do not fit the model or each other.
        FileNotFoundError: If the model looks like a folder and there is none.
    """

    model: str
    passages: "ProbeSpec | str | Path"
    tokenizer: str | None = None
    server: ServerSpec | None = None
    backend: Literal["transformers", "vllm"] = "transformers"
    base: str | None = None
    device: str | None = None
    dtype: str | None = None
    model_args: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    attacks: Sequence[str] | None = None
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS
    max_new_tokens: int = 128
    offset: int = 0
    offsets: Sequence[int] = (64, 96)
    prompt_noise: float = 0.1
    num_samples: int = 10
    temperature: float = 1.0
    top_k: int = 0
    budget: int | None = None
    bos: bool | None = None
    batch_size: int = 64
    output_dir: str | Path | None = None
    limits: str | None = None
    accept_unanswered: bool = False
    accept_unproven: bool = False
    show_passages: bool = False
    overwrite: bool = False
    runner: "TaskRunner | None" = None

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, ("transformers", "vllm"))
        for length in self.prefix_lengths or [0]:
            check_at_least(1, prefix_lengths=length)
        budget = 1 if self.budget is None else self.budget
        check_at_least(
            1, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size, budget=budget
        )
        check_at_least(0, offset=self.offset)
        if self.server is not None:
            if self.tokenizer is None:
                raise ValueError(
                    "a model behind a server needs --tokenizer, in which tokens are counted"
                )
            local = [
                name for name in ("base", "device", "dtype", "model_args") if getattr(self, name)
            ]
            if self.backend != "transformers":
                local.append("backend")
            if local:
                raise ValueError(
                    f"{option_names(local)}: for a model that is loaded here, not behind --base-url"
                )
            if self.bos is not None and self.server.send == "text":
                raise ValueError(
                    "--bos is for token ids: before text the server adds BOS or not, see --send ids"
                )
        else:
            folder = Path(self.model).expanduser()
            require_model_folder(folder)
            if looks_like_path(self.model) and not folder.is_dir():
                raise FileNotFoundError(
                    f"no folder {folder}: name a Hugging Face model or PEFT adapter, or a hub id"
                )
        if self.offset and self.is_named:
            raise ValueError(
                f"--offset {self.offset} is without effect on --attacks: use --offsets "
                f"{self.offset}"
            )
        require_no_options(self.model_args)
        for name, attack in _ATTACK_OF_SETTING.items():
            is_set = getattr(self, name) != _DEFAULTS[name]
            if is_set and attack not in (self.attacks or ("greedy",)):
                raise ValueError(
                    f"{option_names([name])} is a setting of the attack {attack}, which is not "
                    f"asked: add {attack} to --attacks, or leave it out"
                )
        if self.backend == "vllm" and find_spec("vllm") is None:
            raise ValueError(
                "--backend vllm needs the package vllm: pip install vllm, or --backend transformers"
            )
        if self.backend == "vllm" and self.device is not None:
            raise ValueError(
                f"vLLM takes no --device {self.device}: choose GPUs by CUDA_VISIBLE_DEVICES"
            )

    @property
    def is_named(self) -> bool:
        """Whether the report names the attacks."""
        return self.attacks is not None or self.budget is not None

    @property
    def folder(self) -> Path:
        """The output folder: by default runs/audit/mine-checkpoint_100pct for
        runs/mine/checkpoint_100pct.
        """
        return output_folder(self.output_dir, self.model)


_DEFAULTS = {each.name: each.default for each in fields(AuditSpec)}


def output_folder(output_dir: str | Path | None, named: str | Path) -> Path:
    """Return the output folder, by default named after the end of a path."""
    name = "-".join(Path(named).expanduser().resolve().parts[-2:]).strip("/")
    return Path(output_dir or Path("runs/audit") / name).expanduser()
