"""Lives of a Hugging Face Trainer on two gloo ranks, DDP or FSDP2, for tests/store/snapshot/killing.py.

python -m tests.store.snapshot.killing --model trainer-fsdp --kills 200
python -m tests.integrations.trainer_lives fsdp FOLDER: two ranks, then one, then two; what each life says: FOLDER/log.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from octavo.integrations.snapshots import SnapshotCallback
from octavo.store.snapshot.files import Files
from tests.store.snapshot.lives import EVERY, fork_worker

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
SHARDED = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


class Told(Trainer):
    """A Trainer whose losses are seen before anything is averaged or rounded."""

    total = 0.0

    def training_step(self, *arguments, **more):
        loss = super().training_step(*arguments, **more)
        self.total += loss.item()
        return loss


class Steps(TrainerCallback):
    def __init__(self, tell, trainer, snapshots):
        self.tell, self.trainer, self.snapshots = tell, trainer, snapshots

    def on_step_begin(self, args, state, control, **parts):
        if self.trainer is not None:
            self.tell("start", state.global_step, fingerprint(self.trainer.model))
        self.begun, self.trainer = self.trainer or self.begun, None

    def on_step_end(self, args, state, control, **parts):
        self.tell("step", state.global_step, self.begun.total.hex())
        self.begun.total = 0.0
        self.tell("durable", self.snapshots.durable or 0)

    begun = None


def fingerprint(model: torch.nn.Module) -> str:
    """Of all weights, put together from their shards."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def rows() -> Dataset:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 64, (24, 12), generator=generator).tolist()
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in tokens])


def live(kind: str, folder: Path, log: int, steps: int, files: Files, rank: int, world: int, store: str) -> None:
    """As killing.live: resume, train, snapshot, until the end or death."""

    def tell(*words: object) -> None:
        os.write(log, (" ".join(map(str, (rank, *words))) + "\n").encode())

    torch.set_num_threads(1)
    more = {}
    if world > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # accelerate insists; the group is there already
        if kind.startswith("fsdp"):
            more = {"fsdp": True, "fsdp_config": SHARDED}
    args = TrainingArguments(
        str(folder.parent / "trainer"), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True, **more
    )  # fmt: skip
    args.device  # noqa: B018  # asked for, accelerate looks around
    if more:  # which shards on GPUs alone: told that these are some, it does the same here
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attention_dropout=0.1, attn_implementation="eager"))
    if kind.endswith("-lora"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    start = fork_worker(files if rank == 0 else Files(), lambda pid: tell("worker", pid))
    snapshots = SnapshotCallback(folder, every=EVERY, start=start, signals=False)
    trainer = Told(model, args, train_dataset=rows())
    trainer.add_callback(Steps(tell, trainer, snapshots.snapshots))
    trainer.add_callback(snapshots)
    trainer.train(resume_from_checkpoint=snapshots.resume(trainer))
    snapshots.close()
    tell("weights", steps, fingerprint(trainer.model))
    tell("end", steps)


def main() -> None:
    kind, root = sys.argv[1], Path(sys.argv[2])
    log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for steps, world in ((6, 2), (9, 1), (12, 2)):
        pids = []
        for rank in range(world):
            if not (pid := os.fork()):
                code = 1
                try:
                    live(kind, root / "run", log, steps, Files(), rank, world, str(root / f"store{steps}"))
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(codes):
            sys.exit(f"a rank of {world} failed")


if __name__ == "__main__":
    main()
