"""Find the place in a recipe of a key that other training codes spell differently, or that is in the wrong section."""

from dataclasses import fields

from .sections import SECTIONS


MIXTURES = "one folder, into which several sources are mixed before (docs/train.md, Data)"
HERE = {  # for each key of a recipe, the keys of transformers' Trainer, nanoGPT, torchtitan and litgpt
    "data.source": "dataset dataset_name dataset_path train_file train_data_dir",
    "data.sequence_length": "max_seq_length max_seq_len max_length seq_len block_size context_length",
    "optimizer.name": "optim optimizer",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.clip": "max_grad_norm grad_clip max_norm gradient_clipping",
    "schedule.name": "lr_scheduler_type lr_scheduler scheduler",
    "schedule.warmup_steps": "num_warmup_steps warmup_iters warmup",
    "schedule.final_ratio": "min_lr min_lr_ratio",
    "training.steps": "max_steps max_iters train_iters total_steps num_steps",
    "training.epochs": "num_train_epochs num_epochs",
    "training.tokens": "max_tokens total_tokens",
    "training.rows_per_step": "global_batch_size batch_size train_batch_size",
    "training.micro_batch_size": "per_device_train_batch_size micro_batch local_batch_size",
    "training.save_every": "save_steps save_interval checkpoint_every checkpoint_interval ckpt_interval",
    "training.keep_last": "save_total_limit keep_latest_k",
    "training.resume": "resume_from_checkpoint load_checkpoint",
    "training.push_to_hub": "hub_model_id",
    "training.compile": "torch_compile",
    "training.gradient_checkpointing": "activation_checkpoint activation_checkpointing recompute",
    "evaluation.every": "eval_steps eval_every eval_interval",
    "logging.every": "logging_steps log_every log_interval log_freq",
    "logging.trackers": "report_to tracker wandb",
    f"data.source, {MIXTURES}": "sources datasets data_mix data_mixture mixture",
    "rows_per_step over micro_batch_size and processes": "gradient_accumulation_steps grad_accum",
    "accelerate launch --mixed_precision": "bf16 fp16 precision mixed_precision dtype",
}
PLACES = {key: place for place, keys in HERE.items() for key in keys.split()}


def place_of(key: str) -> str | None:
    """Return the place in a recipe of a foreign key, or of a key that exactly one section has; None if unknown."""
    sections = [name for name, section in SECTIONS.items() if key in {field.name for field in fields(section)}]
    return f"{sections[0]}.{key}" if len(sections) == 1 else PLACES.get(key)
