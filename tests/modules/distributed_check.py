"""Run by torchrun on 2 gloo ranks: DDP and FSDP2 over a frozen FP8 base with trainable layers around it."""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from octavo import FrozenFloat8Linear, PerBlock, PerRow, PerTensor, Rule


def build(granularity):
    torch.manual_seed(0)
    frozen = FrozenFloat8Linear.from_linear(
        nn.Linear(48, 320), Rule(granularity=granularity), "static", input_scale=0.01
    )
    return nn.Sequential(nn.Linear(16, 48), frozen, nn.SiLU(), nn.Linear(320, 8))


def gradients(model, x):
    model(x).square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[name.removeprefix("module.")] = grad
    return found


def check(granularity, rank):
    reference = build(granularity)
    codes, scale = reference[1].weight.detach().clone(), reference[1].weight_scale.detach().clone()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    want = gradients(copy.deepcopy(reference), x)
    mine = x.chunk(2)[rank]

    ddp = DistributedDataParallel(copy.deepcopy(reference))
    found = gradients(ddp, mine)
    assert found.keys() == want.keys(), found.keys()
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, msg=f"DDP {granularity} {name}")
    assert torch.equal(ddp.module[1].weight, codes)

    sharded = copy.deepcopy(reference)
    fully_shard(sharded[1])
    fully_shard(sharded)
    found = gradients(sharded, mine)
    assert found.keys() == want.keys(), found.keys()
    for name, grad in want.items():
        torch.testing.assert_close(found[name], grad, msg=f"FSDP2 {granularity} {name}")
    optimizer = torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.1)
    optimizer.step()
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        assert torch.equal(state["1.weight"], codes) and state["1.weight"].dtype == torch.uint8
        assert torch.equal(state["1.weight_scale"], scale) and state["1.weight_scale"].dtype == torch.float32
        fresh = build(granularity)
        fresh.load_state_dict(state)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    for granularity in (PerTensor(), PerRow(), PerBlock(128, 32)):
        check(granularity, rank)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} ok", flush=True)
    os._exit(0)  # gloo's threads now and then abort the interpreter's own shutdown: it is not what is tested


if __name__ == "__main__":
    main()
