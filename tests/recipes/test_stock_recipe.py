"""torchtune's own recipe with our loss: one line of its config changed."""

from recipe_processes import run_command


def test_the_stock_recipe_trains_with_the_drop_in(tmp_path, tiny_checkpoint, text_file):
    """The loss line is what a user changes; all else says where the tiny model and its data are."""
    overrides = {
        "loss": "tfidf_tune.loss.stock.CEWithChunkedOutputLoss",
        "model": "torchtune.models.llama2.llama2", "model.vocab_size": 320, "model.num_layers": 2,
        "model.num_heads": 4, "model.num_kv_heads": 2, "model.embed_dim": 32, "model.intermediate_dim": 64,
        "model.max_seq_len": 64, "model.norm_eps": 1e-5,
        "tokenizer": "tfidf_tune.data.hf_tokenizer", "tokenizer.path": tiny_checkpoint, "tokenizer.max_seq_len": 32,
        "checkpointer.checkpoint_dir": tiny_checkpoint, "checkpointer.checkpoint_files": "[model.safetensors]",
        "dataset": "torchtune.datasets.text_completion_dataset", "dataset.source": "text",
        "dataset.data_files": text_file, "dataset.column": "text", "dataset.split": "train[:16]",
        "optimizer": "torch.optim.AdamW", "optimizer.lr": 1e-2, "optimizer_in_bwd": "False",
        "output_dir": tmp_path / "run", "metric_logger.log_dir": tmp_path / "logs",
        "metric_logger.filename": "log.txt", "device": "cpu", "dtype": "fp32", "compile": "True", "epochs": 2,
        "batch_size": 2, "seed": 0, "enable_activation_offloading": "False",
    }  # fmt: skip

    ended = run_command(
        "torchtune._cli.tune:main",
        ["run", "full_finetune_single_device", "--config", "llama2/7B_full_low_memory",
         *(f"{key}={value}" for key, value in overrides.items())],
        tmp_path, TORCH_COMPILE_BACKEND="aot_eager",
    )  # fmt: skip

    assert ended.codes == [0], ended.output
    losses = [
        float(line.split("loss:")[1].split()[0]) for line in (tmp_path / "logs" / "log.txt").read_text().splitlines()
    ]
    assert len(losses) == 16
    assert sum(losses[-3:]) < sum(losses[:3])
