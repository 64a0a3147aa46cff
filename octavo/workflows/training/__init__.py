"""Parts of finetune: its settings, its report, and what `auto` stands for."""
