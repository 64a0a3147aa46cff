"""octavo.load, and from there on nothing but PEFT and TRL: fused from the first step of training, not before."""

import copy
import logging
import os
import pickle

import datasets
import pytest
import torch
import torch.distributed as dist
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trl import SFTConfig, SFTTrainer

import octavo
from octavo.base.errors import RefusedError
from octavo.integrations.fused import FUSED
from octavo.integrations.layers import decoder
from octavo.testing import assert_sqnr
from tests.integrations.test_fused import everywhere, plain  # noqa: F401  used by pytest

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


@pytest.fixture
def trainer(tiny_llama, tiny_tokenizer, tmp_path):
    """trainer(folder, steps): as the documentation of TRL has it."""
    texts = [{"text": "the quick brown fox jumps over the lazy dog. "[: 9 + 4 * i]} for i in range(8)]

    def make(name="trainer", steps=3):
        torch.manual_seed(0)
        model = octavo.load(tiny_llama, device="cpu")
        args = SFTConfig(
            str(tmp_path / name), max_steps=steps, per_device_train_batch_size=2, save_steps=2, learning_rate=1e-2,
            logging_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, max_length=48, packing=True, bf16=True,
        )  # fmt: skip
        data = datasets.Dataset.from_list(texts)
        lora = LoraConfig(**LORA)
        return SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tiny_tokenizer, peft_config=lora)

    return make


def losses(trainer, **options):
    trainer.train(**options)
    return torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])


@pytest.mark.filterwarnings("ignore")  # what TRL and Transformers tell each other
def test_sft_trainer_fuses_resumes_saves_and_generates(everywhere, trainer, tiny_llama, tmp_path):  # noqa: F811
    first = trainer()
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    found = losses(first)
    assert len(everywhere) == 3 * 2 * 6, "three steps, two layers, checkpointed as TRL does by default"
    after = first.model.state_dict()
    assert after.keys() == before.keys()
    assert all(("lora_" in name) != torch.equal(after[name], before[name]) for name in before), "adapters, not codes"
    everywhere.on = False
    assert_sqnr(found, losses(trainer("one by one")), 40.0)
    everywhere.on = True
    again = trainer()
    assert torch.equal(losses(again, resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2")), found)

    ids = torch.tensor([[5, 6, 7, 8]])
    text = again.model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    again.save_model(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(octavo.load(tiny_llama, device="cpu"), str(tmp_path / "adapter"))
    assert torch.equal(loaded.generate(input_ids=ids, max_new_tokens=4, do_sample=False), text)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(saved) == 28 and all("_octavo" not in name for name in saved)


def adapted(folder, config=None):
    torch.manual_seed(0)
    model = get_peft_model(octavo.load(folder, device="cpu"), config or LoraConfig(**LORA))
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.01, generator=torch.Generator().manual_seed(i))
    return model.train()


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


IDS = torch.randint(256, (4, 9), generator=torch.Generator().manual_seed(1))


def test_copies_made_before_training_train_as_well(everywhere, tiny_llama):  # noqa: F811
    model = adapted(tiny_llama)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    want = gradients(model, IDS)
    for other in copies:
        everywhere.clear()
        found = gradients(other, IDS)
        assert len(everywhere) == 6 and all(torch.equal(found[name], want[name]) for name in want)


def test_one_message_says_what_runs_and_why(everywhere, tiny_llama, caplog):  # noqa: F811
    """LoHa's layers take their turn one by one; those without are fused."""
    caplog.set_level(logging.INFO, "octavo")
    model = adapted(tiny_llama, LoHaConfig(r=2, target_modules=["q_proj"]))
    said, on_gpu = octavo.explain(model).training, octavo.explain(model, gpu="h100").training
    for _ in range(2):
        assert any("hada" in name for name in gradients(model, IDS))
    assert everywhere == ["project", "gated_mlp"] * 4
    assert said == ("training layer by layer: needs a CUDA device of sm89 or later, this is cpu",)
    assert on_gpu == (
        "training: 12 of 14 FP8 linears multiply in FP8, forward and backward; "
        "the others run one by one: adapters of PEFT's loha",
    )
    assert [record.getMessage() for record in caplog.records if "training" in record.getMessage()] == list(said)


def test_inference_binds_nothing(everywhere, tiny_llama):  # noqa: F811
    model = octavo.load(tiny_llama, device="cpu")
    model(input_ids=IDS), model.generate(input_ids=IDS[:1, :4], max_new_tokens=2)
    adapted = get_peft_model(model, LoraConfig(**LORA)).eval()
    with torch.no_grad():
        adapted(input_ids=IDS)
    assert not everywhere and not any(FUSED in module.__dict__ for module in model.modules())
    gradients(adapted, IDS)
    assert len(everywhere) == 6, "a loop that never calls train()"


def test_experts_in_fp8_take_no_adapter(tiny_moe):
    """Where PEFT would add to the codes in every pass."""
    with pytest.raises(RefusedError, match="an adapter over stacked experts; got FP8 codes"):
        get_peft_model(octavo.load(tiny_moe, device="cpu"), LoraConfig(**LORA))


def sharded(model):
    for layer in decoder(model).layers:
        fully_shard(layer)
    return fully_shard(model)


def test_two_ranks(everywhere, tiny_llama, tmp_path):  # noqa: F811
    """DDP and FSDP2 give the mean of what each half gives by itself."""
    model = adapted(tiny_llama)
    halves = [gradients(model, half) for half in IDS.chunk(2)]
    children = []
    for rank in range(2):
        if not (child := os.fork()):
            code = 1
            try:
                torch.set_num_threads(1)
                store = dist.FileStore(str(tmp_path / "store"), 2)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                everywhere.clear()
                for wrap in (DistributedDataParallel, sharded):
                    found = gradients(wrap(copy.deepcopy(model)), IDS.chunk(2)[rank])
                    found = {name: grad.full_tensor() if wrap is sharded else grad for name, grad in found.items()}
                    save_file(found, tmp_path / f"{wrap.__name__}{rank}.safetensors")
                dist.barrier()
                code = 0 if len(everywhere) == 12 else 2
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    for wrap in (DistributedDataParallel, sharded):
        found = load_file(tmp_path / f"{wrap.__name__}0.safetensors")
        assert found.keys() == halves[0].keys()
        for name, grad in found.items():
            torch.testing.assert_close(grad, (halves[0][name] + halves[1][name]) / 2)
