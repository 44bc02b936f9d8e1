"""Tiny models, tokenizers and probe files for the tasks, and what the harness wrote about them."""

import contextlib
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval.models.huggingface import HFLM
from sentencepiece_model import train_sentencepiece
from tiny_llama import VOCAB_SIZE, make_tokenizer
from tiny_models import MODELS

from tfidf_tune.data import Passage, hf_tokenizer, read_probe_file, write_probe_file
from tfidf_tune.tasks import evaluate, tasks_folder

NUM_POSITIONS = 256
FAMILIES = ("gpt_neox", "gptj", "llama")
MEMORIZATION = ("tfidf_memorization_p32", "tfidf_memorization_p50", "tfidf_memorization_p100")
WORDS = [
    *("the", "a", "of", "under", "over", "river", "stone", "light", "house", "green", "walks", "sings", "harbour"),
    *("painted", "letters", "clock", "evening", "1984", "café", "naïve", "🙂", "東京", "judge,", "sailor .", "it's"),
]
# No tokenizer here was trained on these: a character of theirs is several tokens, and a prefix may end inside it.
RARE_WORDS = ["ψυχή", "大阪", "🙃", "straße"]

SQUAD_ROWS = [
    {
        "id": str(number),
        "title": "Normans",
        "context": "The Normans gave their name to Normandy, a region in France. They were descended from Norse "
        'raiders ("Norman" comes from "Norseman") and pirates from Denmark, Iceland and Norway.',
        "question": question,
        "answers": {"text": answers, "answer_start": [0] * len(answers)},
    }
    for number, (question, answers) in enumerate(
        [
            ("In what country is Normandy?", ["France", "in France", "a region in France"]),
            ("Whose name has Normandy?", ["The Normans", "Normans"]),
            ("Where did the raiders come from?", ["Denmark, Iceland and Norway", "Denmark"]),
        ]
    )
]
NEWS_ROWS = [
    {
        "id": "a",
        "article": "The river sings.\nA stone walks under a light 🙂",
        "highlights": "the river sings\na stone",
    },
    {"id": "b", "article": "seven letters under the green house " * 12, "highlights": "letters, seven of them ."},
]


def text(seed: int, num_words: int, words: Sequence[str] = (*WORDS, *RARE_WORDS)) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(words) for _ in range(num_words))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def random_model(family: str, *, vocab_size: int = VOCAB_SIZE, **sizes: Any) -> transformers.PreTrainedModel:
    """An architecture with random weights, and positions enough for a prefix of 100 and 128 tokens more."""
    tiny, positions = MODELS[family], "n_positions" if family == "gptj" else "max_position_embeddings"
    sizes = {positions: NUM_POSITIONS, **sizes}
    model = dataclasses.replace(tiny, hf=lambda dim: tiny.hf(dim) | sizes).build_hf()
    if vocab_size != VOCAB_SIZE:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def byte_level_tokenizer(folder: Path, *, add_bos: bool = False, **special_tokens: str) -> Path:
    """Byte-level BPE; an emoji is several tokens. ``add_bos`` puts BOS before every text, as Llama 3's does."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder.parent / "corpus.txt"
    corpus.write_text("\n".join(text(seed, 40, WORDS) for seed in range(30)), encoding="utf-8")
    make_tokenizer(folder, corpus)
    if special_tokens or add_bos:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens(special_tokens)
        if add_bos:
            from tokenizers.processors import TemplateProcessing

            bos = (tokenizer.bos_token, tokenizer.bos_token_id)
            tokenizer._tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
        tokenizer.save_pretrained(folder)
    return folder


def sentencepiece_tokenizer(folder: Path) -> Path:
    """Only a SentencePiece ``tokenizer.model``, like Llama's."""
    return train_sentencepiece(folder, [text(seed, 40, WORDS) for seed in range(30)], vocab_size=400)


def llama_tokenizer(folder: Path, sentencepiece_folder: Path) -> Path:
    """The same as ``tokenizer.json``: it puts BOS before a text, and the space a text starts with is lost."""
    transformers.LlamaTokenizer.from_pretrained(sentencepiece_folder, add_bos_token=True).save_pretrained(folder)
    return folder


def checkpoint(folder: Path, model: transformers.PreTrainedModel, tokenizer_folder: Path) -> Path:
    """A complete Hugging Face folder."""
    model.save_pretrained(folder)
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def passages_of(
    tokenizer_folder: Path,
    *,
    num_targets: int = 2,
    num_controls: int = 2,
    num_tokens: int = 240,
    first_seed: int = 100,
    words: Sequence[str] = (*WORDS, *RARE_WORDS),
) -> list[Passage]:
    tokenizer = hf_tokenizer(str(tokenizer_folder))
    kinds = ["target"] * num_targets + ["control"] * num_controls
    passages = []
    for number, kind in enumerate(kinds):
        whole = text(first_seed + number, num_tokens, words)
        ids = tokenizer.encode_batch([whole])[0][:num_tokens]
        passages.append(
            Passage(
                id=f"{kind}-{number:04}",
                kind=kind,
                text=whole,
                token_ids=ids,
                num_injections=9 if kind == "target" else 0,
                positions=[],
                source="words",
                tokenizer=str(tokenizer_folder),
                tokenizer_fingerprint=tokenizer.fingerprint,
            )
        )
    return passages


def probe_file(path: Path, passages: list[Passage]) -> Path:
    write_probe_file(path, passages)
    return path


def teach(model: transformers.PreTrainedModel, probe: Path, num_steps: int = 400) -> transformers.PreTrainedModel:
    """Train until every target is recited: each id is the most probable one by a margin after those before it."""
    ids = torch.tensor([passage.token_ids for passage in read_probe_file(probe) if passage.kind == "target"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    model.train()
    for _ in range(num_steps):
        logits = model(input_ids=ids).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        if loss.unflatten(0, (len(ids), -1))[:, 31:].max() < 0.2:
            return model.eval()
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    raise AssertionError(f"the model did not learn in {num_steps} steps: {float(loss.max())}")


@dataclasses.dataclass(frozen=True)
class Output:
    """The files that the harness wrote below a folder."""

    folder: Path

    @property
    def file(self) -> Path:
        [file] = self.folder.rglob("results_*.json")
        return file

    def metrics(self, task: str) -> dict[str, Any]:
        values = json.loads(self.file.read_text())["results"][task]
        return {key.removesuffix(",none"): value for key, value in values.items() if key.endswith(",none")}

    def group(self, group: str) -> dict[str, Any]:
        values = json.loads(self.file.read_text())["groups"][group]
        return {key.removesuffix(",none"): value for key, value in values.items() if key.endswith(",none")}

    def samples(self, task: str) -> list[dict[str, Any]]:
        [file] = self.folder.rglob(f"samples_{task}_2*.jsonl")
        with file.open(encoding="utf-8") as lines:  # a text may hold other line separators
            samples = [json.loads(line) for line in lines]
        return sorted(samples, key=lambda sample: sample["doc_id"])

    def docs(self, task: str) -> list[dict[str, Any]]:
        return [sample["doc"] for sample in self.samples(task)]


def run_tasks(
    model_args: dict[str, Any] | Path, tasks: str | list[str] | tuple[str, ...], output: Path, **settings: Any
) -> Output:
    """Call ``evaluate`` on the CPU; settings other than batch size and limit are metadata."""
    options = {key: settings.pop(key) for key in ("batch_size", "limit") if key in settings}
    evaluate(
        model_args if isinstance(model_args, dict) else {"pretrained": str(model_args), "dtype": "float32"},
        [tasks] if isinstance(tasks, str) else list(tasks),
        output,
        metadata={key: str(value) if isinstance(value, Path) else value for key, value in settings.items()},
        device="cpu",
        **options,
    )
    return Output(output)


@contextlib.contextmanager
def embedded_ids() -> Iterator[list[torch.Tensor]]:
    """Record the ids that reach the embedding of any model in every forward pass."""
    calls: list[torch.Tensor] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            calls.append(args[0].clone())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        yield calls
    finally:
        hook.remove()


def prompts_seen(calls: list[torch.Tensor]) -> list[list[int]]:
    """Return the rows of the forward passes without a cache."""
    return [row for call in calls if call.shape[1] > 1 for row in call.tolist()]


def lm_eval(
    command: Callable[..., None],
    output: Path,
    tasks: str,
    *arguments: str,
    model_args: str,
    metadata: dict[str, Any],
) -> Output:
    """Run the harness's own command with the stock model."""
    command(
        "lm_eval",
        *("--model", "hf", "--model_args", model_args, "--include_path", str(tasks_folder()), "--tasks", tasks),
        *("--metadata", json.dumps({key: str(v) if isinstance(v, Path) else v for key, v in metadata.items()})),
        *("--device", "cpu", "--log_samples", "--output_path", str(output), *arguments),
    )
    return Output(output)


@contextlib.contextmanager
def recorded_pairs() -> Iterator[list[tuple[list[int], list[int]]]]:
    """Record the given and the scored ids of each request to the harness's model, in order."""
    pairs: list[tuple[list[int], list[int]]] = []
    original = HFLM._loglikelihood_tokens

    def record(self: HFLM, requests: list[Any], **kwargs: Any) -> Any:
        pairs.extend((context, continuation) for _, context, continuation in requests)
        return original(self, requests, **kwargs)

    HFLM._loglikelihood_tokens = record
    try:
        yield pairs
    finally:
        HFLM._loglikelihood_tokens = original
