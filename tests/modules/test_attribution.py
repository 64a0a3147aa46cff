"""The divergence that each layer alone would cause, from backward passes, against causing and measuring it."""

import copy

import pytest
import torch
from torch import nn

from octavo.modules.attribution import Attribution, fisher_draw
from octavo.modules.divergence import kl_divergence


class Toy(nn.Module):
    """Tokens that do not see each other: embedding, three linears, logits."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + torch.tanh(self.a(x)) * self.b(x) + self.c(x))


def perturbed(linear, size):
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        twin.weight += size * torch.randn_like(twin.weight)
    return twin


def test_draw_has_the_covariance_of_the_softmax():
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(1)).expand(60_000, 6)
    v = fisher_draw(logits, torch.Generator().manual_seed(2))
    p = logits[0].softmax(-1)
    torch.testing.assert_close(v.mT @ v / len(v), p.diag() - p[:, None] * p, atol=4e-3, rtol=0)


@pytest.mark.parametrize("together", [False, True], ids=["each alone", "two as one unit"])
def test_agrees_with_measured_divergence(together):
    torch.manual_seed(0)
    model = Toy().requires_grad_(False)
    sizes = {"a": 0.02, "b": 0.01, "c": 0.03}
    twins = {name: perturbed(model.get_submodule(name), size) for name, size in sizes.items()}
    units = {"a": "ab", "b": "ab", "c": "c"} if together else {name: name for name in sizes}
    tokens = torch.randint(40, (2000,))
    generator = torch.Generator().manual_seed(3)
    with torch.enable_grad(), Attribution(model, {"x": twins}, units) as seen:
        wake = model.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
        for _ in range(5):
            seen.backward(model(tokens), generator)
        wake.remove()
    found = seen.result()["x"]
    assert set(found) == set(units.values())
    reference = model(tokens)
    for unit, estimate in found.items():
        changed = copy.deepcopy(model)
        for name in (n for n, u in units.items() if u == unit):
            changed.set_submodule(name, twins[name])
        measured = float(kl_divergence(reference, changed(tokens)).mean())
        assert estimate == pytest.approx(measured, rel=0.1), unit
    assert not any(module._forward_hooks for module in model.modules()), "hooks are gone"
