"""``tfidf-tune demo``: how much a small model recites under plain cross-entropy and under TF-IDF, on this computer.

A Llama of 3.4 million parameters learns the English that every Python carries (its documentation), with some passages
repeated many times among the rest. It is trained from one common start under each objective by the recipe
full_finetune, in a process of its own; every milestone is then probed for the repeated passages, for passages that it
never saw, and for perplexity on held-out text. What is done is kept: a second run shows the results at once.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import DictConfig, OmegaConf

from tfidf_tune._files import atomic_file, atomic_folder
from tfidf_tune.analysis import (
    CheckpointResult,
    MemorizationSummary,
    ProbeSample,
    load_model,
    memorization_table,
    plot_lms_progress,
    probe,
    qualitative_example,
    read_samples,
    relative_reduction,
    summarize,
    token_perplexity,
    write_samples,
)
from tfidf_tune.data import (
    HFTokenizer,
    Passage,
    embedded_documents,
    hf_tokenizer,
    read_probe_file,
    text_blocks,
    train_embedded_tokenizer,
)
from tfidf_tune.training import config_path, milestone_name

CONFIG = "demo/llama_3M_full_memorization"
OBJECTIVES = {"CE": "tfidf_tune.loss.CrossEntropyLoss", "TF-IDF": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}


def run_demo(output_dir: Path, *, seed: int = 0) -> list[CheckpointResult]:
    """Prepare, train under each objective, probe every milestone, and print table, example and figure.

    Args:
        output_dir (Path): everything is kept here, in a folder for each seed and state of the demo's config.
        seed (int): of the weights, the data order and the injections. Default: 0.

    Returns:
        list[CheckpointResult]: one for each objective and milestone, as in the table.
    """
    start_time = time.perf_counter()
    transformers.utils.logging.disable_progress_bar()
    cfg = OmegaConf.load(config_path(CONFIG))
    assert isinstance(cfg, DictConfig)
    digest = hashlib.sha256(OmegaConf.to_yaml(cfg).encode()).hexdigest()[:8]
    folder = output_dir / f"seed{seed}-{digest}"
    _say(f"Everything is kept in {folder}.")
    start = _make_start(cfg, folder / "start", seed)
    runs = {objective: folder / objective.lower().replace("-", "") for objective in OBJECTIVES}
    for objective, run in runs.items():
        _train(cfg, objective, run, start, seed)

    tokenizer = hf_tokenizer(str(start))
    passages = read_probe_file(next(iter(runs.values())) / "probe.jsonl")
    _describe(cfg, passages)
    results = [
        _evaluate(objective, percent, run, tokenizer, passages)
        for objective, run in runs.items()
        for percent in cfg.save_at_percent
    ]
    _report(cfg, results, runs, passages, tokenizer, folder / "memorization.png")
    _say(f"Done in {time.perf_counter() - start_time:.0f} s.")
    return results


def _say(text: str) -> None:
    print(text, flush=True)


def _make_start(cfg: DictConfig, folder: Path, seed: int) -> Path:
    """The common start: a Hugging Face folder with a tokenizer of the embedded corpus and random weights."""
    if folder.is_dir():
        return folder
    _say("Training a tokenizer on the documentation that comes with Python ...")
    sizes = cfg.model
    with atomic_folder(folder) as temporary:
        train_embedded_tokenizer(temporary, vocab_size=sizes.vocab_size)
        torch.manual_seed(seed)
        tokenizer = hf_tokenizer(str(temporary))
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=sizes.vocab_size,
                num_hidden_layers=sizes.num_layers,
                num_attention_heads=sizes.num_heads,
                num_key_value_heads=sizes.num_kv_heads,
                hidden_size=sizes.embed_dim,
                intermediate_size=sizes.intermediate_dim,
                max_position_embeddings=sizes.max_seq_len,
                rms_norm_eps=sizes.norm_eps,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_id,
            )
        ).save_pretrained(temporary)
    return folder


def _train(cfg: DictConfig, objective: str, run: Path, start: Path, seed: int) -> None:
    """Train under an objective by ``tfidf-tune run full_finetune``, as a user would."""
    if (run / milestone_name(max(cfg.save_at_percent))).is_dir():
        _say(f"{objective}: trained already.")
        return
    shutil.rmtree(run, ignore_errors=True)  # what an interrupted demo left
    _say(f"{objective}: training ...")
    command = [sys.executable, "-m", "tfidf_tune.cli", "run", "full_finetune", "--config", CONFIG]
    overrides = {
        "output_dir": run,
        "checkpointer.checkpoint_dir": start,
        "seed": seed,
        "loss": OBJECTIVES[objective],
    }
    finished = subprocess.run([*command, *(f"{key}={value}" for key, value in overrides.items())], check=False)
    if finished.returncode != 0:
        sys.exit(f"error: the recipe ended with exit code {finished.returncode}; its message is above")


def _describe(cfg: DictConfig, passages: list[Passage]) -> None:
    data, controls = cfg.dataset, sum(passage.kind == "control" for passage in passages)
    _say(
        f"\n{data.num_targets} passages of {data.block_size} tokens were injected {data.num_repeats} times each among "
        f"{data.num_base} other blocks; {controls} passages never seen are the controls.\n"
        "Each is continued greedily from its first 32, 50 and 100 tokens."
    )


def _evaluate(
    objective: str, percent: int, run: Path, tokenizer: HFTokenizer, passages: list[Passage]
) -> CheckpointResult:
    """Probe a milestone, or read what an earlier demo measured."""
    result_file = run / "evaluation" / f"{milestone_name(percent)}.json"
    if result_file.is_file():
        return _read_result(result_file)
    _say(f"{objective}: probing the checkpoint at {percent} % ...")
    model = load_model(run / milestone_name(percent))
    samples = probe(model, tokenizer, passages)
    write_samples(_samples_file(run, percent), samples)
    summary = summarize(samples)
    held_out = text_blocks(tokenizer, embedded_documents("validation"), block_size=256, num_blocks=100)
    result = CheckpointResult(
        objective=objective,
        progress=percent,
        targets=summary["target"],
        controls=summary["control"],
        perplexity=token_perplexity(model, held_out),
    )
    with atomic_file(result_file) as file:
        file.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


def _samples_file(run: Path, percent: int) -> Path:
    return run / "evaluation" / f"{milestone_name(percent)}_samples.jsonl"


def _read_result(file: Path) -> CheckpointResult:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for kind in ("targets", "controls"):
        content[kind] = MemorizationSummary(**content[kind])
    return CheckpointResult(**content)


def _report(
    cfg: DictConfig,
    results: list[CheckpointResult],
    runs: dict[str, Path],
    passages: list[Passage],
    tokenizer: HFTokenizer,
    figure: Path,
) -> None:
    _say(f"\n{memorization_table(results)}\n")
    last_percent = max(cfg.save_at_percent)
    baseline, ours = (
        next(result for result in results if (result.objective, result.progress) == (objective, last_percent))
        for objective in OBJECTIVES
    )
    _say(
        "At the end of training, TF-IDF against CE: average LMS "
        f"{-100 * relative_reduction(baseline.targets.avg_lms, ours.targets.avg_lms):+.1f} %, perplexity "
        f"{-100 * relative_reduction(baseline.perplexity, ours.perplexity):+.1f} %. One seed: other seeds give other "
        "numbers (--seed).\n"
    )
    last_samples: dict[str, list[ProbeSample]] = {
        objective: read_samples(_samples_file(run, last_percent)) for objective, run in runs.items()
    }
    _say(qualitative_example(last_samples, passages, tokenizer.decode))
    plot_lms_progress(results, figure)
    _say(f"\nAverage LMS against training progress: {figure}")
