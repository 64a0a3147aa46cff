"""The knapsack against brute force over all choices."""

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.pipelines import frontier as module
from octavo.pipelines.frontier import Option, frontier

options = st.builds(Option, st.just("x"), st.integers(-5, 30), st.integers(0, 40).map(lambda x: x / 8))
problems = st.lists(st.lists(options, min_size=1, max_size=3), max_size=6)


def totals(groups):
    """(weight, loss) of every choice."""
    for picked in product(*groups):
        yield sum(o.weight for o in picked), sum(o.loss for o in picked)


@settings(deadline=None, max_examples=150)
@given(problems, st.integers(-10, 120))
def test_best_of_all_choices_at_every_weight(groups, capacity):
    found = frontier(groups, capacity)
    allowed = [total for total in totals(groups) if total[0] <= capacity]
    if not allowed:
        assert not found
        return
    assert [c.weight for c in found] == sorted({c.weight for c in found})
    assert all(a.loss > b.loss for a, b in pairwise(found))
    for limit in {weight for weight, _ in allowed}:
        best = min(loss for weight, loss in allowed if weight <= limit)
        assert [c.loss for c in found if c.weight <= limit][-1] == best
    for choice in found:
        picked = [group[index] for group, index in zip(groups, choice.picks, strict=True)]
        assert (choice.weight, choice.loss) == (sum(o.weight for o in picked), sum(o.loss for o in picked))


def test_many_different_weights_stay_near_the_best(monkeypatch):
    groups = [[Option("fp8", 0, 1.0 + i / 7), Option("16bit", 1000 + 37 * i * i, 0.0)] for i in range(14)]
    exact = frontier(groups)
    monkeypatch.setattr(module, "MOST", 40)
    near = frontier(groups)
    assert len(near) <= 41 < len(exact)
    slack = 14 * exact[-1].weight / 39
    for choice in exact:
        assert min(c.loss for c in near if c.weight <= choice.weight + slack) <= choice.loss


def test_unlimited_ends_with_no_loss_left():
    groups = [[Option("fp8", 0, 0.5), Option("16bit", 3, 0.0)] for _ in range(4)]
    found = frontier(groups)
    assert [(c.weight, c.loss) for c in found] == [(0, 2.0), (3, 1.5), (6, 1.0), (9, 0.5), (12, 0.0)]
    assert frontier([]) == [module.Choice(0, 0.0, ())]
