"""Knowledge of verify and explain: one file per engine, data before code, and what the engines share."""
