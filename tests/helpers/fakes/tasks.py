"""Tiny models, tokenizers and probe files for the tasks, and what the harness wrote about them."""

import contextlib
import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing

from helpers.fakes.sentencepiece_model import train_sentencepiece
from helpers.fakes.tiny_llama import VOCAB_SIZE, make_tokenizer
from helpers.fakes.tiny_models import MODELS
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import Passage, write_probe_file
from tfidf_tune.tasks import evaluate, tasks_folder

FAMILIES = ("gpt_neox", "gptj", "llama")
MEMORIZATION = ("tfidf_memorization_p32", "tfidf_memorization_p50", "tfidf_memorization_p100")
WORDS = [
    "the",
    "a",
    "of",
    "under",
    "over",
    "river",
    "stone",
    "light",
    "house",
    "green",
    "walks",
    "sings",
    "harbour",
    "painted",
    "letters",
    "clock",
    "evening",
    "1984",
    "café",
    "naïve",
    "🙂",
    "東京",
    "judge,",
    "sailor .",
    "it's",
]
# No tokenizer here was trained on these: a character of theirs is several tokens, and a prefix may
# end inside it.
RARE_WORDS = ["ψυχή", "大阪", "🙃", "straße"]

NORMANS = (
    "The Normans gave their name to Normandy, a region in France. They were descended from Norse "
    "raiders "
    '("Norman" comes from "Norseman") and pirates from Denmark, Iceland and Norway.'
)
QUESTIONS = {
    "In what country is Normandy?": ["France", "in France", "a region in France"],
    "Whose name has Normandy?": ["The Normans", "Normans"],
    "Where did the raiders come from?": ["Denmark, Iceland and Norway", "Denmark"],
}
SQUAD_ROWS = [
    {
        "id": str(n),
        "title": "Normans",
        "context": NORMANS,
        "question": question,
        "answers": {"text": answers},
    }
    for n, (question, answers) in enumerate(QUESTIONS.items())
]
NEWS = {
    "The river sings.\nA stone walks under a light 🙂": "the river sings\na stone",
    "seven letters under the green house " * 12: "letters, seven of them .",
}
NEWS_ROWS = [
    {"id": str(n), "article": article, "highlights": NEWS[article]}
    for n, article in enumerate(NEWS)
]


def text(seed: int, num_words: int, words: Sequence[str] = (*WORDS, *RARE_WORDS)) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(words) for _ in range(num_words))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def make_tokenizers(folder: Path) -> dict[str, Path]:
    """Byte-level BPE, in which an emoji is several tokens, and SentencePiece.

    Without BOS; with a BOS that is EOS and not added, as Pythia's; and three that add it to a text:
    as Llama 3's, from ``tokenizer.model`` alone, and Llama's ``tokenizer.json``, which loses the
    space that a text starts with.
    """
    texts = [text(seed, 40, WORDS) for seed in range(30)]
    (folder / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")
    plain = make_tokenizer(folder / "plain", folder / "corpus.txt")
    for name, bos in (("pythia", "<|endoftext|>"), ("adds_bos", "<|begin|>")):
        tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
        tokenizer.add_special_tokens({"bos_token": bos})
        if name == "adds_bos":
            special = [(bos, tokenizer.bos_token_id)]
            tokenizer._tokenizer.post_processor = TemplateProcessing(
                single=f"{bos} $A", special_tokens=special
            )
        tokenizer.save_pretrained(folder / name)
    sentencepiece = train_sentencepiece(folder / "sentencepiece", texts, vocab_size=400)
    transformers.LlamaTokenizer.from_pretrained(sentencepiece, add_bos_token=True).save_pretrained(
        folder / "llama"
    )
    return {
        name: folder / name for name in ("plain", "pythia", "adds_bos", "sentencepiece", "llama")
    }


def random_model(
    family: str = "llama", *, vocab_size: int = VOCAB_SIZE
) -> transformers.PreTrainedModel:
    """An architecture with random weights, and positions enough for a prefix of 100 and 128 tokens
    more.
    """
    tiny = MODELS[family]
    positions = "n_positions" if family == "gptj" else "max_position_embeddings"
    model = dataclasses.replace(tiny, hf=lambda dim: tiny.hf(dim) | {positions: 256}).build_hf()
    if vocab_size != VOCAB_SIZE:
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
    return model


def checkpoint(
    folder: Path, tokenizer_folder: Path, model: transformers.PreTrainedModel | None = None
) -> Path:
    """A complete Hugging Face folder, by default of a random Llama with as many rows as the
    tokenizer has tokens.
    """
    model = model or random_model(vocab_size=hf_tokenizer(str(tokenizer_folder)).vocab_size)
    model.save_pretrained(folder)
    return Path(shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True))


def passages_of(
    tokenizer_folder: Path,
    *,
    num_targets: int = 2,
    num_controls: int = 2,
    num_tokens: int = 240,
    words: Sequence[str] = (*WORDS, *RARE_WORDS),
) -> list[Passage]:
    tokenizer = hf_tokenizer(str(tokenizer_folder))
    passages = []
    of_tokenizer = {
        "tokenizer": str(tokenizer_folder),
        "tokenizer_fingerprint": tokenizer.fingerprint,
    }
    for number, kind in enumerate(["target"] * num_targets + ["control"] * num_controls):
        whole = text(100 + number, num_tokens, words)
        ids = tokenizer.encode_batch([whole])[0][:num_tokens]
        num_injections = 9 if kind == "target" else 0
        passages.append(
            Passage(
                f"{kind}-{number:04}", kind, whole, ids, num_injections, [], "words", **of_tokenizer
            )
        )
    return passages


def probe_file(path: Path, passages: list[Passage]) -> Path:
    write_probe_file(path, passages)
    return path


@dataclasses.dataclass(frozen=True)
class Output:
    """The files that the harness wrote below a folder."""

    folder: Path

    @property
    def file(self) -> Path:
        [file] = self.folder.rglob("results_*.json")
        return file

    def metrics(self, task: str, kind: str = "results") -> dict[str, Any]:
        values = json.loads(self.file.read_text())[kind][task]
        return {
            key.removesuffix(",none"): value
            for key, value in values.items()
            if key.endswith(",none")
        }

    def samples(self, task: str) -> list[dict[str, Any]]:
        [file] = self.folder.rglob(f"samples_{task}_2*.jsonl")
        with file.open(encoding="utf-8") as lines:  # a text may hold other line separators
            samples = [json.loads(line) for line in lines]
        return sorted(samples, key=lambda sample: sample["doc_id"])

    def docs(self, task: str) -> list[dict[str, Any]]:
        return [sample["doc"] for sample in self.samples(task)]


def _with_file_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with paths as text, as JSON takes them."""
    settings = settings.copy()
    for key, value in settings.items():
        if isinstance(value, Path):
            settings[key] = str(value)
    return settings


def run_tasks(
    model_args: dict[str, Any] | Path,
    tasks: str | list[str] | tuple[str, ...],
    output: Path,
    **settings: Any,
) -> Output:
    """Call ``evaluate`` on the CPU; settings other than batch size and limit are metadata."""
    options = {key: settings.pop(key) for key in ("batch_size", "limit") if key in settings}
    if not isinstance(model_args, dict):
        model_args = {"pretrained": str(model_args), "dtype": "float32"}
    evaluate(
        model_args,
        [tasks] if isinstance(tasks, str) else list(tasks),
        output,
        metadata=_with_file_names(settings),
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
    rows: list[list[int]] = []
    for call in calls:
        if call.shape[1] > 1:
            rows += call.tolist()
    return rows


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
        "--model",
        "hf",
        "--model_args",
        model_args,
        "--include_path",
        str(tasks_folder()),
        "--tasks",
        tasks,
        "--metadata",
        json.dumps(_with_file_names(metadata)),
        "--device",
        "cpu",
        "--log_samples",
        "--output_path",
        str(output),
        *arguments,
    )
    return Output(output)
