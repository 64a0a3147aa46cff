"""How far one language model is from another on the same tokens: paired metrics that stream, window by window.

Everything is a mean over windows of equal length with its standard error over the windows, because tokens of one window
depend on each other and windows hardly do. Differences are paired: what a text costs both models cancels out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.base.errors import CheckpointError, DataError, MismatchError

# Vocabulary rows in float32 at a time: 64 x 128k x 4 bytes x a handful of temporaries stays near 150 MB.
ROWS = 64


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error over windows; se is nan for a single window."""

    mean: float
    se: float

    @classmethod
    def of(cls, values: list[float]) -> Estimate:
        n = len(values)
        if not n:
            raise DataError("nothing was measured", got="no windows", fix="Give more text or a shorter context.")
        mean = math.fsum(values) / n
        if n == 1:
            return cls(mean, math.nan)
        return cls(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n))


def known(value: float) -> float | None:
    """A figure for a report: None for what a single window leaves open (nan)."""
    return value if math.isfinite(value) else None


def t_quantile(windows: int) -> float:
    """The two-sided 95 % point of Student's t for a mean of so many windows; inf for one.

    Expansion about the normal quantile: Abramowitz and Stegun 26.7.5, three terms; exact values are used below four
    degrees of freedom, where the expansion is off by more than a percent.
    """
    nu = windows - 1
    if nu < 1:
        return math.inf
    if nu < 4:
        return (12.706, 4.303, 3.182)[nu - 1]
    z = 1.959964
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / nu + g2 / nu**2 + g3 / nu**3


@dataclass(frozen=True)
class Perplexity:
    """exp(mean negative log-likelihood per predicted token); se in the same unit. windows of `context` tokens each."""

    value: float
    se: float

    @classmethod
    def of(cls, nll: list[float]) -> Perplexity:
        estimate = Estimate.of(nll)
        value = math.exp(estimate.mean) if estimate.mean < 700 else math.inf
        return cls(value, value * estimate.se)


@dataclass(frozen=True)
class Divergence:
    """A candidate against its reference on the same tokens.

    rise: of the perplexity, percent: 100 (exp(mean paired difference of nll) - 1). kl: KL(reference || candidate),
    nats per token. kl_p99: its 99th percentile over tokens. top1: share of positions where both models put the same
    token first. lost, gained: share of tokens that only the reference, or only the candidate, puts first rightly.
    within_noise: the 95 % interval of the paired difference holds zero.
    """

    reference: Perplexity
    candidate: Perplexity
    rise: Estimate
    kl: Estimate
    kl_p99: float
    top1: Estimate
    lost: Estimate
    gained: Estimate
    within_noise: bool


def window_nll(logits: torch.Tensor, tokens: torch.Tensor, who: str = "the model") -> float:
    """Mean nll, nats, of tokens[1:] given logits[:-1]. logits [T, V] of any float dtype, tokens int64 [T]."""
    _check(logits, tokens, who)
    tokens, total = tokens.to(logits.device), 0.0
    for start in range(0, len(tokens) - 1, ROWS):
        stop = min(start + ROWS, len(tokens) - 1)
        logp = torch.log_softmax(logits[start:stop].float(), -1)
        total -= float(logp.gather(1, tokens[start + 1 : stop + 1, None]).double().sum())
    return _mean_nll(total, tokens, who)


class PairedScore:
    """Add windows of logits of both models; `result()` at any time. Keeps one float per token, no logits."""

    def __init__(self) -> None:
        self.reference_nll: list[float] = []
        self.candidate_nll: list[float] = []
        self.kl: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.flips: list[tuple[float, float]] = []

    def add(self, reference: torch.Tensor, candidate: torch.Tensor, tokens: torch.Tensor) -> None:
        """One window: logits [T, V] of each model, any float dtype, and its tokens, int64 [T] on any device."""
        if reference.shape != candidate.shape:
            got = f"logits {list(reference.shape)} and {list(candidate.shape)}"
            raise MismatchError("the two models do not share a vocabulary", got=got, need="equal shapes")
        for logits, who in ((reference, "the reference"), (candidate, "the candidate")):
            _check(logits, tokens, who)
        tokens = tokens.to(reference.device)
        kl, same, nll, lost, gained = [], [], torch.zeros(2, dtype=torch.float64), 0, 0
        for start in range(0, len(tokens), ROWS):
            rows, following = slice(start, start + ROWS), tokens[start + 1 : start + ROWS + 1, None]
            logp, logq = (torch.log_softmax(logits[rows].float(), -1) for logits in (reference, candidate))
            kl.append(_kl(logp, logq).cpu())
            first, second = logp.argmax(-1), logq.argmax(-1)
            same.append((first == second).cpu())
            right, still = (x[: len(following), None] == following for x in (first, second))
            lost, gained = lost + int((right & ~still).sum()), gained + int((~right & still).sum())
            for i, x in enumerate((logp, logq)):
                nll[i] -= x[: len(following)].gather(1, following).double().sum().cpu()
        self.reference_nll.append(_mean_nll(float(nll[0]), tokens, "the reference"))
        self.candidate_nll.append(_mean_nll(float(nll[1]), tokens, "the candidate"))
        self.kl.append(torch.cat(kl))
        self.same.append(torch.cat(same))
        self.flips.append((lost / (len(tokens) - 1), gained / (len(tokens) - 1)))

    def result(self) -> Divergence:
        """DataError if no window was added."""
        paired = [c - r for r, c in zip(self.reference_nll, self.candidate_nll, strict=True)]
        difference = Estimate.of(paired)
        growth = math.exp(min(difference.mean, 700.0))
        width = t_quantile(len(paired)) * difference.se if len(paired) > 1 else math.inf
        return Divergence(
            reference=Perplexity.of(self.reference_nll),
            candidate=Perplexity.of(self.candidate_nll),
            rise=Estimate(100 * (growth - 1), 100 * growth * difference.se),
            kl=Estimate.of([float(kl.double().mean()) for kl in self.kl]),
            kl_p99=float(torch.quantile(torch.cat(self.kl), 0.99)) if self.kl else math.nan,
            top1=Estimate.of([float(same.double().mean()) for same in self.same]),
            lost=Estimate.of([lost for lost, _ in self.flips]),
            gained=Estimate.of([gained for _, gained in self.flips]),
            within_noise=abs(difference.mean) <= width,
        )


def kl_divergence(reference: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL(reference || candidate) of each row, nats, float32 [T]; logits [T, V]. A zero probability adds nothing."""
    return _kl(torch.log_softmax(reference.float(), -1), torch.log_softmax(candidate.float(), -1))


def _kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    p = logp.exp()
    return torch.where(p > 0, p * (logp - logq), 0.0).sum(-1)


def _mean_nll(total: float, tokens: torch.Tensor, who: str) -> float:
    if not math.isfinite(total):
        raise CheckpointError(f"the logits of {who}", got="NaN or Inf", fix="octavo verify looks for the tensor.")
    return total / (len(tokens) - 1)


def _check(logits: torch.Tensor, tokens: torch.Tensor, who: str) -> None:
    if logits.ndim != 2 or len(logits) != len(tokens) or len(tokens) < 2:
        got = f"logits {list(logits.shape)} for {len(tokens)} tokens"
        raise DataError(f"{who}: a window", got=got, need="[T, V] logits for T >= 2 tokens")
    if int(tokens.max()) >= logits.shape[1]:
        got = f"token {int(tokens.max())}, {logits.shape[1]} logits"
        raise MismatchError(f"{who}: the tokenizer knows more tokens than the model", got=got)
    if bool(logits[-1].isnan().any()):  # the row that predicts nothing: the nll would not show it
        raise CheckpointError(f"the logits of {who}", got="NaN", fix="octavo verify looks for the tensor.")
