"""F5: the only folder that imports transformers, peft, trl, accelerate, datasets and lm_eval, on call."""
