"""Full fine-tuning of a torchtune model on one process or many, all weights trained.

    tune run tfidf_tune/recipes/full_finetune.py --config tinyllama/1.1B_full_memorization
    tfidf-tune run full_finetune --config tinyllama/1.1B_full_memorization batch_size=4

Keys: :class:`tfidf_tune.training.FinetuneConfig`. The run's folder gets ``checkpoint_10pct`` to
``checkpoint_100pct``, each a complete Hugging Face model, ``metrics.jsonl``, ``config.yaml`` and
``resume/``.
"""

from functools import partial

from omegaconf import DictConfig

from tfidf_tune import training


@training.recipe
def recipe_main(user_cfg: DictConfig) -> training.NextSteps:
    """Check everything, then load, train, and save at the milestones."""
    cfg = training.check_config(user_cfg, training.FinetuneConfig)
    with training.open_run(cfg) as run:
        with training.setup_errors():  # report setup errors here, before the first weight is read
            checkpointer = training.instantiate(cfg, "checkpointer")
            model = training.build_model(cfg, run, checkpointer)
            training.require_no_lora(model)
            checkpointer.check_model(model)
            loss = training.build_loss(cfg).to(run.device)
            training.check_resources(cfg, model, loss, run, checkpointer)
            tokenizer = training.build_tokenizer(cfg, model)
            training.set_special_tokens(loss, tokenizer)
            resume = training.open_resume(cfg, run)
            dataset = training.build_dataset(cfg, tokenizer)
            training.keep_chat_template(cfg, checkpointer)
            resume.check_inputs(dataset, checkpointer)
            monitor = training.build_monitor(cfg, dataset, tokenizer, model, run)
            counts_tokens = loss.weighting.needs_tokens
            dataloader = training.build_dataloader(
                cfg, dataset, tokenizer, run, counts_tokens=counts_tokens
            )

        training.prepare_model(model, loss, cfg)
        training.shard_model(model, cfg, run)
        training.load_model(model, checkpointer, run, dataset)
        total_steps = training.count_steps(cfg, dataloader)
        training.print_data(cfg, dataset, total_steps)
        training.print_advice(cfg)
        optimizer, lr_scheduler = training.build_optimizer(cfg, model.parameters(), total_steps)
        state = training.TrainState(
            model, loss, optimizer, lr_scheduler, training.build_grad_scaler(run)
        )
        resume.restore(state)
        training.print_least_time(cfg, model, dataset, run, total_steps - resume.step)
        with training.open_progress(
            cfg, run, total_steps, resume.step, resume.tokens_seen
        ) as progress:
            training.write_probe_files(cfg, dataset)
            save = partial(checkpointer.save_model, model)
            training.train(
                cfg, state, dataloader, run, progress, resume, save=save, monitor=monitor
            )
        return training.next_steps(cfg, dataset, run)


if __name__ == "__main__":
    recipe_main()
