"""verify's static verdict on Transformers is what Transformers does with the folders that vLLM is asked about too."""

import pytest
import torch

from octavo.workflows.verify import VerifyConfig, verify
from tests.serve.checkpoints import logprobs_of
from tests.serve.verdicts import CASES, loud

IDS = torch.randint(4, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
NONSENSE = 0.3  # of the spread of the 16-bit model's answers; FP8 costs at most half of it


def answers(folder):
    from transformers import AutoModelForCausalLM

    return torch.tensor(logprobs_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), IDS))


def serves(folder, truth):
    try:
        got = answers(folder)
    except Exception:  # whatever it is that stops it: the folder does not load
        return False
    return bool((got - truth).abs().mean() < NONSENSE * truth.std())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_verdict_is_what_transformers_does(name, tmp_path):
    case = CASES[name]
    truth = answers(loud(**dict(case.model)).write(tmp_path / "truth"))
    folder = case.write(tmp_path / "ckpt")
    report = verify(VerifyConfig(folder=folder, engine="transformers", gpu="cpu"))
    assert (report.verdict != "error") == serves(folder, truth), report.findings
