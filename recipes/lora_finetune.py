"""LoRA fine-tuning of a torchtune model on one device, the adapters alone trained.

    tune run tfidf_tune/recipes/lora_finetune.py --config tinyllama/1.1B_lora_memorization
    tfidf-tune run lora_finetune --config tinyllama/1.1B_lora_memorization model.lora_rank=16

Keys: :class:`tfidf_tune.training.LoRAFinetuneConfig`. The run's folder gets ``checkpoint_10pct`` to
``checkpoint_100pct``, each a PEFT adapter, or with ``merge_adapter=True`` a complete Hugging Face model,
``metrics.jsonl`` and ``config.yaml``.
"""

from functools import partial

from omegaconf import DictConfig
from torchtune import config

from tfidf_tune import training


@training.recipe
def recipe_main(user_cfg: DictConfig) -> None:
    """Check everything, then load, train, and save at the milestones."""
    cfg = training.check_config(user_cfg, training.LoRAFinetuneConfig)
    run = training.open_run(cfg)

    # What can be wrong is found here, before the first weight is read.
    checkpointer = config.instantiate(cfg.checkpointer)
    model = training.build_model(cfg.model, run)
    training.LoRASettings.require(model)
    checkpointer.check_model(model)
    tokenizer = training.build_tokenizer(cfg, model)
    loss = training.build_loss(cfg).to(run.device)
    dataset = training.build_dataset(cfg, tokenizer, model)
    dataloader = training.build_dataloader(cfg, dataset, tokenizer, run)

    training.load_model(model, checkpointer, run)
    training.train_adapters_only(model)
    training.prepare_model(model, loss, cfg)
    optimizer = training.build_optimizer(cfg, model)
    lr_scheduler = training.build_lr_scheduler(cfg, optimizer, training.count_steps(cfg, dataloader))

    save = checkpointer.save_model if cfg.merge_adapter else checkpointer.save_adapter
    with training.open_progress(cfg, run, training.count_steps(cfg, dataloader)) as progress:
        training.train(
            cfg,
            model,
            loss,
            optimizer,
            lr_scheduler,
            dataloader,
            device=run.device,
            progress=progress,
            save=partial(save, model),
        )


if __name__ == "__main__":
    recipe_main()
