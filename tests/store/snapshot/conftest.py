"""A small model, its training state, and a writer that is forked instead of started: milliseconds, not seconds."""

import pytest
import torch
from torch import nn

from octavo.store.snapshot.files import Files
from octavo.store.snapshot.snapshots import Snapshots
from octavo.store.snapshot.state import TrainingState
from tests.store.snapshot.lives import fork_worker


def make_state(width=8, extra=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainingState(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), extra)


def train(state, snapshots, begin, end):
    """Steps begin+1 to end; the loss of each."""
    losses = {}
    for step in range(begin, end):
        x = torch.randn(4, 8)
        loss = (state.model(x) - x).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        state.optimizer.step()
        state.scheduler.step()
        losses[step + 1] = loss.item()
        if snapshots.step_done(step + 1):
            break
    return losses


@pytest.fixture
def new(tmp_path):
    """Snapshots in tmp_path/snapshots, at every second step, whose writer uses the given Files."""

    def build(files=None, **options):
        options = {"every": 4, "signals": False, "exits": False, "start": fork_worker(files or Files()), **options}
        return Snapshots(tmp_path / "snapshots", **options)

    return build
