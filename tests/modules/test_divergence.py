"""Paired metrics against plain formulas in float64, and what they say about noise."""

import math

import pytest
import torch

from octavo.base.errors import CheckpointError, DataError, MismatchError
from octavo.modules.divergence import Estimate, PairedScore, Perplexity, kl_divergence, t_quantile, window_nll


def windows(count, noise, seed=0, length=150, vocabulary=40):
    """Logits of a reference, of a candidate near it, and tokens; more rows than one slice."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        reference = torch.randn(length, vocabulary, generator=generator) * 2
        other = reference + noise * torch.randn(length, vocabulary, generator=generator)
        yield reference, other, torch.randint(vocabulary, (length,), generator=generator)


def score(count, noise, **kwargs):
    paired = PairedScore()
    for reference, candidate, tokens in windows(count, noise, **kwargs):
        paired.add(reference, candidate, tokens)
    return paired.result()


def test_against_plain_formulas():
    result = score(5, 0.3)
    nll, kl, same = [[], []], [], []
    for reference, candidate, tokens in windows(5, 0.3):
        logp, logq = (torch.log_softmax(x.double(), -1) for x in (reference, candidate))
        for i, x in enumerate((logp, logq)):
            nll[i].append(float(-x[torch.arange(149), tokens[1:]].mean()))
        kl.append((logp.exp() * (logp - logq)).sum(-1))
        same.append((logp.argmax(-1) == logq.argmax(-1)).double())
    nll = torch.tensor(nll, dtype=torch.float64)
    difference = nll[1] - nll[0]
    assert result.reference.value == pytest.approx(float(nll[0].mean().exp()), rel=1e-6)
    assert result.candidate.value == pytest.approx(float(nll[1].mean().exp()), rel=1e-6)
    assert result.candidate.se == pytest.approx(float(nll[1].mean().exp() * nll[1].std() / 5**0.5), rel=1e-5)
    assert result.rise.mean == pytest.approx(100 * math.expm1(float(difference.mean())), rel=1e-4)
    assert result.rise.se == pytest.approx(100 * float(difference.mean().exp() * difference.std() / 5**0.5), rel=1e-4)
    assert result.kl.mean == pytest.approx(float(torch.cat(kl).mean()), rel=1e-5)
    assert result.kl.se == pytest.approx(float(torch.stack([x.mean() for x in kl]).std() / 5**0.5), rel=1e-4)
    assert result.kl_p99 == pytest.approx(float(torch.cat(kl).quantile(0.99)), rel=1e-4)
    assert result.top1.mean == pytest.approx(float(torch.cat(same).mean()))


def test_equal_models_are_equal():
    result = score(3, 0.0)
    assert (result.rise.mean, result.rise.se, result.kl.mean, result.kl_p99) == (0, 0, 0, 0)
    assert result.top1.mean == 1
    assert result.within_noise


def test_a_uniform_model_has_the_perplexity_of_its_vocabulary():
    nll = window_nll(torch.zeros(9, 50, dtype=torch.bfloat16), torch.arange(9))
    assert Perplexity.of([nll]).value == pytest.approx(50)
    assert math.isnan(Perplexity.of([nll]).se)


def test_noise_verdict_has_its_stated_rate():
    """Two equally good models 200 times: the difference is called real in about 5 % of the cases."""
    generator = torch.Generator().manual_seed(1)
    wrong = 0
    for _ in range(200):
        values = torch.randn(6, generator=generator).tolist()
        estimate = Estimate.of(values)
        wrong += abs(estimate.mean) > t_quantile(6) * estimate.se
    assert 2 <= wrong <= 20


def test_a_real_difference_is_not_noise():
    paired = PairedScore()
    for reference, _, tokens in windows(8, 0.0):
        boosted = reference.clone()
        boosted[torch.arange(149), tokens[1:]] += 0.2
        paired.add(reference, boosted, tokens)
    result = paired.result()
    assert result.rise.mean < 0 and not result.within_noise


def test_one_window_never_decides():
    assert score(1, 1.0).within_noise


@pytest.mark.parametrize(("count", "exact"), [(2, 12.706), (4, 3.182), (5, 2.776), (9, 2.306), (25, 2.064)])
def test_t_quantile(count, exact):
    assert t_quantile(count) == pytest.approx(exact, rel=0.004)


def test_zero_probability_adds_nothing():
    reference = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert kl_divergence(reference, torch.tensor([[0.0, 0.0, -torch.inf]])).tolist() == [0.0]
    assert kl_divergence(reference, torch.tensor([[0.0, 0.0, 0.0]])).item() == pytest.approx(math.log(1.5))


def test_bad_input():
    good, tokens = torch.zeros(4, 10), torch.arange(4)
    with pytest.raises(CheckpointError, match="logits of the candidate"):
        PairedScore().add(good, torch.full((4, 10), torch.nan), tokens)
    last = good.clone()
    last[-1, 3] = torch.nan
    with pytest.raises(CheckpointError, match="logits of the reference"):
        PairedScore().add(last, good, tokens)
    with pytest.raises(MismatchError, match="share a vocabulary"):
        PairedScore().add(good, torch.zeros(4, 11), tokens)
    with pytest.raises(MismatchError, match="more tokens than the model"):
        window_nll(good, tokens + 10)
    with pytest.raises(DataError, match="a window"):
        window_nll(good[:1], tokens[:1])
    with pytest.raises(DataError, match="nothing was measured"):
        PairedScore().result()


def test_flips_are_counted_both_ways():
    """Of four predicted tokens the reference is right about 0, 1, 2 and the candidate about 1, 3."""
    tokens = torch.tensor([5, 1, 2, 3, 4])
    guess = {"reference": [1, 2, 3, 0, 0], "candidate": [0, 2, 0, 4, 0]}
    score = PairedScore()
    score.add(*(10 * torch.nn.functional.one_hot(torch.tensor(guess[k]), 6).float() for k in guess), tokens)
    result = score.result()
    assert (result.lost.mean, result.gained.mean) == (2 / 4, 1 / 4)
    assert result.top1.mean == 2 / 5
