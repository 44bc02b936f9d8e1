"""Settings of the tasks, from the harness's metadata: how ids are sent, whether BOS
is before them.
"""

import difflib
import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from tfidf_tune._checks import require_bool, require_choice
from tfidf_tune._tokenizer import known_bos
from tfidf_tune.probe import run_of
from tfidf_tune.probe.loading import on_base_model, readable
from tfidf_tune.tasks._requests import TokenIdPrompts, cached_prompts, original_tokenizer

_PROMPTS = ("token_ids", "text", "ids_to_text")


def prompts_for(metadata: Mapping[str, Any]) -> TokenIdPrompts:
    """Decide from the harness's metadata how ids are sent.

    ``prompts`` is "token_ids", "text" or "ids_to_text". ``bos``, or ``add_bos_token`` of the
    model's arguments, says whether BOS is before ids. If it is "auto", the run that wrote the model
    says it, or else its tokenizer; if neither does, the setting stays None, and no BOS is added.
    """
    _require_no_typing_error(metadata)
    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise ValueError(
            "no tokenizer is named: give --model_args pretrained=MODEL, or --metadata "
            "tokenizer=FOLDER"
        )
    # The harness's stock model takes ids only with a pass-through tokenizer.
    original = original_tokenizer(str(name))
    prompts = metadata.get("prompts") or ("text" if original is None else "token_ids")
    require_choice("prompts", prompts, _PROMPTS)
    bos = _bos_setting(metadata, prompts)
    prompts_of_task = cached_prompts(str(original or name), prompts, bos)
    if prompts != "text":
        bos_id = prompts_of_task.tokenizer.bos_id
        if bos and bos_id is None:
            raise ValueError(
                f"bos=true: the tokenizer {str(original or name)!r} has no BOS: use bos=false"
            )
        if bos is None:
            run = metadata.get("run") or run_of(metadata)
            bos = known_bos(prompts_of_task.tokenizer, run.get("bos"))
            prompts_of_task = cached_prompts(str(original or name), prompts, bos)
    backend = str(metadata.get("backend", ""))
    return replace(
        prompts_of_task,
        positions=_num_positions(metadata),
        backend=backend,
        is_served=bool(metadata.get("base_url")) or "completions" in backend,
    )


@functools.cache
def settings_of_tasks() -> frozenset[str]:
    """Return the names of all settings that a task of ours takes from the harness's metadata."""
    from tfidf_tune.tasks import (
        cnn_dailymail,
        membership,
        memorization,
        perplexity,
        positive_control,
        squad,
    )

    names = {"prompts", "bos", "add_bos_token", "tokenizer", "prompt_obstacle"}
    for module in (cnn_dailymail, membership, memorization, perplexity, positive_control, squad):
        for name, function in vars(module).items():
            # A module may import functions of other tasks.
            is_defined_here = getattr(function, "__module__", None) == module.__name__
            if name.endswith("documents") and is_defined_here:
                names |= inspect.signature(function).parameters.keys()
    return frozenset(names - {"metadata"})


def _require_no_typing_error(metadata: Mapping[str, Any]) -> None:
    """Refuse a key that is nearly the name of a setting; the arguments of models, which are here
    too, are not.
    """
    known = settings_of_tasks()
    for key in metadata:
        nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        if nearest and key not in known:
            raise ValueError(f"no setting {key!r} of a task: did you mean {nearest[0]!r}?")


def _bos_setting(metadata: Mapping[str, Any], prompts: str) -> bool | None:
    """Return whether the settings want BOS before ids; None if they do not say."""
    known = {"true": True, "false": False, "auto": None, "none": None}
    wanted: dict[str, bool | None] = {}
    for name in ("bos", "add_bos_token"):
        text = str(metadata.get(name, "auto")).lower()
        require_choice(name, text, tuple(known))
        if known[text] is not None:
            wanted[name] = known[text]
    if prompts == "text" and "bos" in wanted:
        raise ValueError(
            f"bos={metadata['bos']} is for prompts of token ids: BOS before text is added by the "
            "tokenizer of the harness, see add_bos_token in --model_args, or by the server"
        )
    if len(set(wanted.values())) > 1:
        raise ValueError(
            f"bos={metadata['bos']} and add_bos_token={metadata['add_bos_token']} differ: leave "
            "out one"
        )
    return next(iter(wanted.values()), None)


def _num_positions(metadata: Mapping[str, Any]) -> int | None:
    """Return how many positions the model ``pretrained`` has; None if that is not known."""
    if not metadata.get("pretrained"):
        return None
    arguments = on_base_model(metadata)
    name = str(arguments["pretrained"])
    # None lets transformers ask on the terminal.
    trust_remote_code = arguments.get("trust_remote_code", False)
    require_bool("trust_remote_code", trust_remote_code)
    # The config alone is read, before any weights.
    with readable(name):
        config = AutoConfig.from_pretrained(
            name,
            revision=arguments.get("revision", "main"),
            trust_remote_code=trust_remote_code,
        )
    # The arguments of the harness's models can lower what the config has.
    limits = (
        getattr(config, "max_position_embeddings", None),
        metadata.get("max_length"),
        metadata.get("max_model_len"),
    )
    return min((int(limit) for limit in limits if limit), default=None)
