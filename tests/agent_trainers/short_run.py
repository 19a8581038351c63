"""Settings of a short run on CPU."""

SETTINGS = {
    "max_steps": 1, "num_generations": 4, "num_generations_eval": 1,
    "per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "max_completion_length": 24,
    "learning_rate": 1e-3, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    "dataloader_pin_memory": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
    "disable_tqdm": True,
}  # fmt: skip
