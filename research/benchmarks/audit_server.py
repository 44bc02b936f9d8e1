"""Compare audits of one model through transformers and through an OpenAI-compatible server, or vLLM
in the process.

    python -m transformers.cli.transformers serve --device cpu --port 8078 MODEL    # needs fastapi and uvicorn
    python audit_server.py MODEL TEXTS CONTROLS --server "transformers serve" --weights bfloat16 \
        --base-url http://localhost:8078/v1

    python -m llama_cpp.server --model MODEL.gguf --n_ctx 1024 --logits_all true    # llama-cpp-python[server]
    python audit_server.py MODEL TEXTS CONTROLS --server llama-cpp-python --weights Q4_1 --served-model any \
        --base-url http://localhost:8000/v1

    vllm serve MODEL --max-model-len 1024    # and --server "vllm serve" --weights bfloat16, at the same address
    python audit_server.py MODEL TEXTS CONTROLS --server vLLM --weights bfloat16    # in the process

Each is a `tfidf-tune audit` of the same texts. The records are read by docs/audit.md.
"""

import argparse
import tempfile
from typing import Any

from measuring import add_output, finish, markdown_table, run_audit


def main() -> None:
    """Audit twice and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("texts")
    parser.add_argument("controls")
    parser.add_argument("--base-url", help="default: no server, --backend vllm")
    parser.add_argument("--served-model", help="its name at the server; default: MODEL")
    parser.add_argument(
        "--server", required=True, help="name and version of the server, for the record"
    )
    parser.add_argument(
        "--weights", required=True, help="what the server computes with, for the record"
    )
    parser.add_argument("--block-size", default="128")
    parser.add_argument(
        "--dtype", default="bfloat16", help="that transformers computes in; default: %(default)s"
    )
    add_output(parser)
    options = parser.parse_args()
    common = [
        options.texts,
        "--controls",
        options.controls,
        "--passages",
        "random",
        "--block-size",
        options.block_size,
        "--num-targets",
        "12",
        "--num-controls",
        "12",
        "--prefix-lengths",
        "32",
        "--max-new-tokens",
        "64",
    ]
    if options.base_url is None:
        other = [
            options.model,
            "--backend",
            "vllm",
            "--model-args",
            "max_model_len=1024",
            "--dtype",
            "bfloat16",
        ]
    else:
        other = [
            options.served_model or options.model,
            "--base-url",
            options.base_url,
            "--tokenizer",
            options.model,
        ]
    ways = {
        "transformers": [options.model, "--device", "cpu", "--dtype", options.dtype],
        "server": other,
    }
    audits = {}
    for name, (model, *more) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            made = run_audit(model, *common, *more, "--output-dir", folder)
        kept = ("measures", "passages", "recites_targets_more", "positive_control", "recited")
        audits[name] = {key: made[key] for key in kept}
    recorded = {
        name: getattr(options, name)
        for name in ("server", "weights", "block_size", "dtype", "output")
    }
    finish(
        argparse.Namespace(**recorded),
        ("torch", "transformers", "tfidf-tune"),
        table,
        audits=audits,
    )


def table(record: dict[str, Any]) -> str:
    """Lay out a record."""
    audits = record["audits"]
    settings = record["settings"]
    reference = {one["id"]: one["lms"] for one in audits["transformers"]["passages"]}
    served = {one["id"]: one["lms"] for one in audits["server"]["passages"]}
    num_equal = sum(served[key] == lms for key, lms in reference.items())
    rows = []
    for way, made in audits.items():
        if way == "transformers":
            program = "transformers"
            dtype = settings.get("dtype", "bfloat16")
            equal = ""
        else:
            program = settings["server"]
            dtype = settings["weights"]
            equal = f"{num_equal} of {len(reference)}"
        measures = made["measures"]
        row = [
            program,
            dtype,
            f"{measures['lms']['value']:.2f}",
            f"{measures['excess']['value']:.2f}",
            f"{measures['verbatim']['value']:.2f}",
            "yes" if made["recites_targets_more"] else "no",
            _reading(made),
            equal,
        ]
        rows.append(row)
    columns = [
        "through",
        "computes in",
        "LMS",
        "above controls",
        "verbatim",
        "recites more",
        "shown the text",
        "passages of equal LMS",
    ]
    return markdown_table(columns, rows)


def _reading(made: dict[str, Any]) -> str:
    """Return what was read of passages that were shown; records before 2026-11-28 have none."""
    control = made.get("positive_control")
    if control is None:
        return ""
    (reading,) = (one for one in control["readings"] if one["path"] == "text")
    return (
        f"{reading['with_copy']:.1f} of {reading['num_to_read']:.0f}, "
        f"{reading['without_copy']:.1f} without"
    )


if __name__ == "__main__":
    main()
