"""Every architecture x scheme x layout x activation mode: what we export, the engines it is made for can load."""

import pytest

from octavo.formats.architectures import role
from octavo.formats.recipe import Recipe
from octavo.store.conversion import convert_checkpoint
from octavo.store.pieces import find_pieces
from octavo.store.plan import make_plan
from octavo.store.scales import ModuleScales, Scales
from octavo.store.tensors import Checkpoint
from octavo.workflows.rules.planned import judge_everywhere, planned_model
from octavo.workflows.verify import VerifyConfig, verify
from tests.workflows.architectures import EXPERTS, LLAMA_LOADERS, NAMES, SIZES, build

COMBINATIONS = [
    *(("channel", "ct", mode) for mode in ("token", "static", "none")),
    *(("block128", "ct", mode) for mode in ("group128", "none")),
    ("block128", "native", "group128"),
    *(("tensor", "ct", mode) for mode in ("token", "static", "none")),
    *(("tensor", "native", mode) for mode in ("token", "static")),
]


@pytest.fixture(scope="module")
def folder(save_tiny):
    """(name, size) -> a folder, made once."""
    made = {}

    def get(name, size):
        if (name, size) not in made:
            made[name, size] = save_tiny(build(name, size), f"{name}-{size}")
        return made[name, size]

    return get


def stopped(name, scheme, layout, activation, fp8_experts, blocks):
    """Engine -> code, where an engine cannot load what the user asked for; the guide says so. All else must load.

    fp8_experts: any expert is in FP8. blocks: what has block scales: `experts`, `linears`.
    """
    found = {}
    if layout == "native" and name in LLAMA_LOADERS and blocks:
        found["sglang"] = "scales-dropped"  # its Llama loader renames the scales away
    if layout == "ct" and scheme == "block128" and activation == "none":
        found["sglang"] = found["vllm"] = "block-weight-only"
    if layout == "native" and scheme == "tensor":
        found["transformers"] = "scale-name"  # it looks for weight_scale_inv
    if layout == "ct" and "experts" in blocks:
        found["transformers"] = "expert-blocks"
    elif name == "llama4" and fp8_experts:
        found["transformers"] = "experts-dropped"
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_planned_loads_where_it_is_made_for(folder, name, size):
    source = Checkpoint.open(folder(name, size))
    for scheme, layout, activation in COMBINATIONS:
        recipe = Recipe.named(scheme, activation=activation)
        plan = make_plan(source, recipe, layout, scales=some_scales(source) if activation == "static" else None)
        said = judge_everywhere(planned_model(source, plan.entries, plan.quantization_config(recipe)))
        rules = {o.role: o.rule for o in plan.outcomes if o.rule and o.role in ("linear", "expert")}
        blocks = {f"{kind}s" for kind, rule in rules.items() if "block" in rule}
        want = stopped(name, scheme, layout, activation, "expert" in rules, blocks)
        got = {engine: text.split(":")[1].strip() for engine, text in said.items() if text != "ok"}
        assert got == want, (scheme, layout, activation, said)
        assert rules.get("linear") or (layout, size) == ("native", "ragged"), "nothing but ragged blocks may stay"
        if name in EXPERTS and name != "gpt_oss" and layout == "ct":
            assert rules["expert"]


def some_scales(source):
    modules = [p.module for p in find_pieces(source) if role(p.name, p.shape, source.layers) in ("linear", "expert")]
    scales = {module: ModuleScales(input_amax=1.0, input_scale=0.01) for module in modules}
    return Scales(model_fingerprint="m", data_fingerprint="d", samples=1, tokens=1, modules=scales)


# Each family once, the combinations in turn: nothing may be said about the written folder that the plan did not say.
TURNS = [(name, COMBINATIONS[i % len(COMBINATIONS)]) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "combination"), TURNS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_what_is_written_is_what_was_planned(folder, name, combination, tmp_path):
    scheme, layout, activation = combination
    source, planned = Checkpoint.open(folder(name, "whole")), {}
    recipe = Recipe.named(scheme, activation=activation, scale_format="po2")
    scales = some_scales(source) if activation == "static" else None

    def examine(entries, quantization):
        planned.update(judge_everywhere(planned_model(source, entries, quantization)))

    convert_checkpoint(source, tmp_path / "out", recipe, layout=layout, scales=scales, examine=examine)
    for engine, said in planned.items():
        report = verify(VerifyConfig(folder=tmp_path / "out", engine=engine, gpu="sm90", reference=source.folder))
        assert report.verdict == ("error" if said.startswith("error") else "ok"), report.findings


LOADED = [("llama", "ragged", "block128"), ("qwen3_moe", "ragged", "block128"), ("gemma3", "ragged", "block128")]
LOADED += [("mixtral", "whole", "tensor"), ("deepseek_v3", "whole", "channel")]


def loads_in_transformers(source, out, scheme, layout):
    """The static verdict is what Transformers does, and its logits are those of the decoded weights."""
    convert_checkpoint(Checkpoint.open(source), out, Recipe.named(scheme), layout=layout)
    report = verify(VerifyConfig(folder=out, engine="transformers", gpu="cpu", logits=True))
    codes = {finding.code for finding in report.findings if finding.severity != "info"}
    if report.engines["transformers"].verdict == "ok":
        assert report.verdict == "ok" and "logits-agree" in {f.code for f in report.findings}, report.findings
    elif "ragged-dequantize" not in codes:  # the neighbour's scale for a few rows, which logits hardly show
        seen = {"transformers-load", "transformers-missing", "transformers-unexpected", "logits-differ"}
        assert codes & {*seen, "not-decodable"}, codes


@pytest.mark.parametrize(("name", "size", "scheme"), LOADED)
def test_it_loads_in_transformers(folder, name, size, scheme, tmp_path):
    loads_in_transformers(folder(name, size), tmp_path / "out", scheme, "ct")


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", ["ct", "native"])
@pytest.mark.parametrize("scheme", ["channel", "block128", "tensor"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_everything_loads_in_transformers(folder, name, size, scheme, layout, tmp_path):
    if (scheme, layout) == ("channel", "native"):
        pytest.skip("no such layout")
    loads_in_transformers(folder(name, size), tmp_path / "out", scheme, layout)
