"""Load a model in FP8 straight from its 16-bit files, see what is inside, and let it write.

python examples/generate_from_fp8.py MODEL        a folder, a hub id, or demo
"""

import sys

from octavo import FrozenFloat8Linear, load
from octavo.integrations.hub import load_tokenizer, resolve_model

folder = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "demo")
model, tokenizer = load(folder, "channel"), load_tokenizer(folder)
fp8 = [module for module in model.modules() if isinstance(module, FrozenFloat8Linear)]
print(f"{len(fp8)} linears in FP8, {sum(layer.weight.numel() for layer in fp8) / 1e6:.1f} MB of codes")

messages = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
print(tokenizer.decode(answer[0][prompt["input_ids"].shape[1] :], skip_special_tokens=True))
