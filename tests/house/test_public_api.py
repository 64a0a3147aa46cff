"""The public names, that each resolves, and that importing the package does nothing."""

import subprocess
import sys

import octavo

PUBLIC = {
    "load",
    "quantize",
    "dequantize",
    "scaled_mm",
    "convert",
    "calibrate",
    "finetune",
    "export",
    "verify",
    "evaluate",
    "plan",
    "Recipe",
    "Rule",
    "E4M3",
    "E5M2",
    "PerTensor",
    "PerRow",
    "PerGroup",
    "PerBlock",
    "ScaledTensor",
    "FrozenFloat8Linear",
    "Float8Linear",
    "OctavoConfig",
    "Decoder",
    "Float8Cache",
    "Snapshots",
    "TrainingState",
    "why",
    "explain",
    "OctavoError",
}


def test_public_names():
    assert set(octavo.__all__) == PUBLIC


def test_every_name_resolves_and_is_documented():
    for name in octavo.__all__:
        value = getattr(octavo, name)
        if callable(value):
            assert value.__doc__, f"octavo.{name} has no docstring"
    assert set(octavo.__all__) <= set(dir(octavo))


def test_unknown_name_is_an_attribute_error():
    try:
        octavo.quantise  # noqa: B018
    except AttributeError as error:
        assert "quantise" in str(error)
    else:
        raise AssertionError("octavo.quantise resolved")


def test_import_is_lean():
    code = (
        "import sys, octavo; heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'triton'} & set(sys.modules);"
        "assert not heavy, heavy; assert octavo.OctavoError; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
