"""The gate as a full truth table against an expectation written from the published description, and its properties."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headfit import width as w
from headfit.width import Call, Capability, NoLegalWidthError, Policy, plan_width

MODES = ["extend", "mixed", "split_prefill", "draft_extend", "target_verify", "decode", "idle", "dllm_extend"]
ROWS = [0, 1, 64, 65, 4096]
HEADS = [(64, 64), (32, 64), (8, 64), (4, 64), (128, 128), (64, 128), (16, 128)]

FLASHINFER = {"prefill_heads": {8, 16, 32, 64, 128}, "decode_heads": {8, 16, 32, 64, 128}}
CAPABILITIES = {
    "0.6.17 on GB10": Capability("flashinfer_sm120", (12, 1), 64, {16, 32, 64, 128}, {8, 16, 32, 64, 128}),
    "0.6.18 on RTX": Capability("flashinfer_sm120", (12, 0), 64, **FLASHINFER),
    "constant raised to 128": Capability("flashinfer_sm120", (12, 0), 128, **FLASHINFER),
    "split not readable": Capability("flashinfer_sm120", (12, 0), w.NO_BATCH_EXCEEDS, **FLASHINFER),
    "unreadable": Capability.unreadable("flashinfer_sm120", (12, 0), "ImportError"),
    "no split": Capability("triton", (12, 0), 0, range(1, 129), ()),
    "no split on Hopper": Capability("triton", (9, 0), 0, range(1, 129), range(1, 129)),
    "FlashMLA on Hopper": Capability("flashmla", (9, 0), 0, {8, 16, 32, 64, 128}, {64, 128}, fork="entry"),
    "no GPU": Capability("cpu", None, 0, range(1, 129), range(1, 129)),
}
SPLIT = {"0.6.17 on GB10": 64, "0.6.18 on RTX": 64, "constant raised to 128": 128, "no split": 0}


def published_gate(name: str, call: Call, switch: bool, draft: bool) -> int:
    """What SGLang's published change does, plus head legality; written from its description, not from our code."""
    pad = 64 if call.n_local <= 64 else call.n_heads
    if call.n_local == call.n_heads:
        pad = call.n_heads
    allowed = ["extend", "mixed", "split_prefill"] + (["draft_extend"] if draft else [])
    if name not in SPLIT:  # not compute capability 12, or nothing trustworthy was read
        return pad
    prefill_lists = {4: ["no split"], 8: ["0.6.18 on RTX", "constant raised to 128", "no split"]}
    if call.n_local in prefill_lists and name not in prefill_lists[call.n_local]:
        return pad
    original = call.mode if call.original_mode is None else call.original_mode
    opened = (
        switch
        and not call.in_breakable_graph
        and call.mode in allowed
        and original in allowed
        and call.rows > SPLIT[name]
    )
    return call.n_local if opened else pad


@pytest.mark.parametrize("name", CAPABILITIES)
def test_sm12x_prefill_truth_table(name: str) -> None:
    capability = CAPABILITIES[name]
    axes = itertools.product(MODES, [None, *MODES], (False, True), (True, False), ROWS, HEADS, (False,))
    drafts = itertools.product(MODES, [None, *MODES], (False,), (True,), (64, 65), [(32, 64)], (True,))
    opened = 0
    for mode, original, graph, switch, rows, (n_local, n_heads), draft in itertools.chain(axes, drafts):
        call = Call(rows, n_local, n_heads, mode, original, graph)
        policy = Policy.sm12x_prefill(enabled=switch, draft_extend=draft)
        decision = plan_width(call, capability, policy)
        assert decision.width == published_gate(name, call, switch, draft), (call, policy, decision)
        assert decision.padded == (decision.width > n_local)
        assert decision.family == capability.family
        assert decision.reason
        assert "\n" not in decision.reason
        opened += decision.rule == "unpadded"
    assert (opened > 0) == (name in SPLIT)


@pytest.mark.parametrize("name", CAPABILITIES)
def test_padded_and_native_truth_table(name: str) -> None:
    capability = CAPABILITIES[name]
    for mode, original, graph, rows, (n_local, n_heads) in itertools.product(
        MODES, [None, "idle"], (False, True), ROWS, HEADS
    ):
        call = Call(rows, n_local, n_heads, mode, original, graph)
        off = plan_width(call, capability, Policy.padded())
        assert off.width == (n_heads if n_local == n_heads else 64 if n_local <= 64 else n_heads)
        if name == "FlashMLA on Hopper":
            decode = mode in ("decode", "target_verify", "idle") or original == "idle"
            listed = [64, 128] if decode else [8, 16, 32, 64, 128]
        elif "no " in name:
            listed = list(range(1, 129))
        elif name == "unreadable":
            listed = [64, 128]
        else:
            listed = [8, 16, 32, 64, 128]
            if name == "0.6.17 on GB10" and rows > 64:
                listed = [16, 32, 64, 128]
        on = plan_width(call, capability, Policy.native())
        assert on.width == next(h for h in listed if h >= n_local)


@pytest.mark.parametrize(
    ("n_local", "n_heads", "width"),
    [
        *((heads, heads, heads) for heads in (4, 32, 64, 96, 128)),  # TP1: what the model has
        *((n_local, n_heads, 64) for n_local, n_heads in ((64, 128), (32, 64), (1, 64), (2, 4))),
        *((n_local, n_heads, n_heads) for n_local, n_heads in ((96, 192), (65, 130))),
    ],
)
def test_the_pad_of_todays_stacks(n_local: int, n_heads: int, width: int) -> None:
    assert w.padded_width(n_local, n_heads) == width
    any_width = Capability("x", (12, 0), 0, range(1, 257), ())
    assert plan_width(Call(1, n_local, n_heads), any_width, Policy.padded()).width == width


@pytest.mark.parametrize(
    "cc", [None, (1, 2), (8, 9), (9, 0), (10, 3), (11, 0), (12, 0), (12, 1), (12, 9), (13, 0), (120, 0)]
)
def test_the_published_gate_is_for_major_12_alone(cc: tuple[int, int] | None) -> None:
    decision = plan_width(Call(65, 32, 64), Capability("x", cc, 64, {32, 64}, {64}), Policy.sm12x_prefill())
    assert decision.width == (32 if cc in ((12, 0), (12, 1), (12, 9)) else 64)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"enabled": False}, "switch"),
        ({"capability": CAPABILITIES["no split on Hopper"]}, "chip"),
        ({"capability": CAPABILITIES["no GPU"]}, "chip"),
        ({"mode": "target_verify"}, "mode"),
        ({"mode": "draft_extend"}, "mode"),
        ({"original_mode": "idle"}, "original_mode"),
        ({"in_breakable_graph": True}, "graph"),
        ({"rows": 64}, "rows"),
        ({"capability": CAPABILITIES["split not readable"]}, "rows"),
        ({"n_local": 4}, "heads"),
        ({"topk": 192}, "topk"),
        ({}, "unpadded"),
    ],
)
def test_each_term_alone_keeps_the_pad_and_says_so(change: dict, rule: str) -> None:
    default = dataclasses.replace(CAPABILITIES["0.6.18 on RTX"], prefill_topk={128, 512}, decode_topk={128, 512})
    capability = change.pop("capability", default)
    policy = Policy.sm12x_prefill(enabled=change.pop("enabled", True))
    decision = plan_width(Call(**{"rows": 65, "n_local": 32, "n_heads": 64, **change}), capability, policy)
    assert decision.rule == rule
    assert [r for _, r, _ in decision.rejected] == ([] if rule == "unpadded" else [rule])
    assert decision.padded == (rule != "unpadded")


def test_reasons_name_the_numbers_and_a_remedy() -> None:
    reason = plan_width(Call(64, 32, 64), CAPABILITIES["0.6.17 on GB10"], Policy.sm12x_prefill()).reason
    assert "64 rows do not exceed the 64" in reason
    assert "larger chunks" in reason
    reason = plan_width(Call(4096, 8, 64), CAPABILITIES["0.6.17 on GB10"], Policy.sm12x_prefill()).reason
    assert "takes 16, 32, 64, 128 heads, not 8" in reason
    assert "HEADFIT_WIDTH=native" in reason
    reason = plan_width(Call(4096, 32, 64), CAPABILITIES["unreadable"], Policy.sm12x_prefill()).reason
    assert "could not be read" in reason


def test_every_failed_term_is_reported_and_the_first_decides() -> None:
    call = Call(1, 4, 64, "decode", "idle", True, topk=7)
    capability = Capability("x", (9, 0), 64, {64}, {64}, decode_topk={128})
    decision = plan_width(call, capability, Policy.sm12x_prefill(enabled=False))
    assert [rule for _, rule, _ in decision.rejected] == [rule for rule, _ in w.GATE]
    assert decision.rule == "switch"


# ------------------------------------------------------------------ properties, over capabilities nobody listed

heads_sets = st.frozensets(st.sampled_from([1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128]))
capabilities = st.builds(
    Capability,
    family=st.just("any"),
    compute_capability=st.sampled_from([None, (8, 0), (9, 0), (10, 0), (12, 0), (12, 1), (13, 0)]),
    row_split=st.one_of(st.integers(0, 200), st.just(w.NO_BATCH_EXCEEDS)),
    prefill_heads=heads_sets,
    decode_heads=heads_sets,
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    n_heads = draw(st.sampled_from([1, 4, 12, 64, 96, 128]))
    n_local = draw(st.sampled_from([n for n in range(1, n_heads + 1) if n_heads % n == 0]))
    rows = draw(st.one_of(st.integers(0, 300), st.integers(0, 2**70)))
    original = draw(st.one_of(st.none(), st.sampled_from(MODES)))
    return Call(rows, n_local, n_heads, draw(st.sampled_from(MODES)), original, draw(st.booleans()))


policies = st.one_of(
    st.builds(Policy.sm12x_prefill, enabled=st.booleans(), draft_extend=st.booleans()),
    st.builds(Policy.native),
    st.builds(Policy.padded),
)


@settings(max_examples=400, deadline=None)
@given(calls(), capabilities, policies)
def test_properties(call: Call, capability: Capability, policy: Policy) -> None:
    one_kernel = capability.row_split == 0
    above = call.rows > capability.row_split and capability.row_split != w.NO_BATCH_EXCEEDS
    listed = capability.prefill_heads if one_kernel or above else capability.decode_heads
    pad = call.padded_width
    try:
        decision = plan_width(call, capability, policy)
    except NoLegalWidthError:
        least = call.n_local if policy.kind == "native" else pad
        assert not [h for h in listed if h >= least]
        return
    assert decision.width in listed  # never a width the capability does not list
    assert decision.width >= call.n_local  # never narrower than n_local
    assert decision.padded == (decision.width != call.n_local)
    assert 0 <= decision.wasted < 1
    assert decision.width <= w.allocation_width(call.n_local, call.n_heads, capability)
    assert decision == plan_width(call, capability, policy)  # pure
    if policy.kind == "native":
        assert decision.width == min(h for h in listed if h >= call.n_local)
        return
    if decision.width < pad:  # unpadding only strictly above the split, in the gate's scope
        assert policy.kind == "sm12x-prefill"
        assert one_kernel or above
        assert decision.width == call.n_local
        assert {call.mode, call.original_mode or call.mode} <= policy.modes
        assert not call.in_breakable_graph
    else:
        assert decision.width == min(h for h in listed if h >= pad)


def test_a_gap_in_the_table_pads_wider_or_refuses_but_never_narrows() -> None:
    wider = plan_width(Call(1, 8, 64), Capability("x", (9, 0), 0, {8, 128}, ()), Policy.padded())
    assert (wider.width, wider.rule) == (128, "padded")
    assert "takes no 64 heads" in wider.reason
    with pytest.raises(NoLegalWidthError, match="HEADFIT_WIDTH=native would run 16 heads"):
        plan_width(Call(1, 8, 64), Capability("x", (9, 0), 0, {16, 32}, ()), Policy.padded())
    with pytest.raises(NoLegalWidthError, match="takes nothing heads"):
        plan_width(Call(1, 8, 64), Capability("x", (9, 0), 4, {16}, ()), Policy.native())
    with pytest.raises(ValueError, match="none of these holds the 64 heads"):
        plan_width(Call(1, 64, 64), Capability("x", (9, 0), 0, {16}, ()), Policy.native())


def test_topk_that_no_width_takes_keeps_the_pad_under_native_too() -> None:
    capability = Capability("x", (12, 0), 64, range(1, 129), range(1, 129), prefill_topk={128}, decode_topk={128, 192})
    assert plan_width(Call(65, 8, 64, topk=192), capability, Policy.native()).rule == "topk"
    assert plan_width(Call(65, 8, 64, topk=192), capability, Policy.native()).width == 64
    assert plan_width(Call(64, 8, 64, topk=192), capability, Policy.native()).width == 8


# ------------------------------------------------------------------------------------------------- from_env


SWITCH = "SGLANG_OPT_DSV4_UNPAD_PREFILL_MLA_HEADS"


@pytest.mark.parametrize(
    ("environ", "kind", "enabled"),
    [
        ({}, "native", True),
        ({"HEADFIT_WIDTH": ""}, "native", True),
        ({"HEADFIT_WIDTH": "native"}, "native", True),
        ({"HEADFIT_WIDTH": "Native "}, "native", True),
        ({"HEADFIT_WIDTH": "padded"}, "padded", True),
        ({"HEADFIT_WIDTH": "sm12x-prefill"}, "sm12x-prefill", True),
        ({"HEADFIT_WIDTH": "sm12x-prefill", SWITCH: "0"}, "sm12x-prefill", False),
        ({"HEADFIT_WIDTH": "sm12x-prefill", SWITCH: "true"}, "sm12x-prefill", True),
        ({"HEADFIT_WIDTH": "native", SWITCH: "0"}, "native", True),
        ({SWITCH: "1"}, "native", True),
        ({SWITCH: "false"}, "sm12x-prefill", False),
    ],
)
def test_from_env(environ: dict[str, str], kind: str, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADFIT_WIDTH", SWITCH):
        monkeypatch.delenv(name, raising=False)
    assert (Policy.from_env(environ).kind, Policy.from_env(environ).enabled) == (kind, enabled)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert Policy.from_env() == Policy.from_env(environ)


@pytest.mark.parametrize("environ", [{"HEADFIT_WIDTH": "wide"}, {SWITCH: "maybe"}])
def test_from_env_refuses_bad_values(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(environ))}: got .* accepted are"):
        Policy.from_env(environ)


def test_switched_off_by_the_environment_keeps_the_pad_and_names_the_variable() -> None:
    decision = plan_width(Call(4096, 32, 64), CAPABILITIES["0.6.18 on RTX"], Policy.from_env({SWITCH: "0"}))
    assert (decision.width, decision.rule) == (64, "switch")
    assert f"{SWITCH}=0" in decision.reason


# ------------------------------------------------------------------------------------------------ validation


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"rows": -1}, "rows: got -1, need an integer >= 0"),
        ({"rows": 1.5}, "rows: got 1.5"),
        ({"rows": True}, "rows: got True"),
        ({"n_local": 0}, "n_local: got 0"),
        ({"n_local": 24}, "n_local: got 24, which does not divide n_heads = 64"),
        ({"n_local": 128}, "n_local: got 128, which does not divide"),
        ({"n_heads": 0}, "n_heads: got 0"),
        ({"mode": "prefill"}, "mode: got 'prefill', accepted are extend"),
        ({"mode": 3}, "mode: got 3"),
        ({"mode": None}, "mode: got None"),
        ({"original_mode": "EXTEND"}, "original_mode: got 'EXTEND'"),
        ({"in_breakable_graph": 1}, "in_breakable_graph: got 1"),
        ({"topk": -1}, "topk: got -1"),
        ({"extra_topk": -5}, "extra_topk: got -5"),
    ],
)
def test_call_is_checked(arguments: dict, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        Call(**{"rows": 1, "n_local": 32, "n_heads": 64, **arguments})


def test_the_arguments_of_plan_width_are_checked() -> None:
    good = (Call(1, 8, 64), CAPABILITIES["no GPU"], Policy.native())
    for bad in ((good[0], good[2], good[1]), ({"rows": 1}, *good[1:]), (*good[:2], "native")):
        with pytest.raises(TypeError, match=r"plan_width: got .* need .Call, Capability, Policy. in this order"):
            plan_width(*bad)  # type: ignore[arg-type]


class Even:
    """A container that answers membership only."""

    def __contains__(self, item: object) -> bool:
        return isinstance(item, int) and item % 2 == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"family": ""}, "family: got ''"),
        ({"compute_capability": 12}, "compute_capability: got 12, need .major, minor."),
        ({"compute_capability": (12,)}, "compute_capability: got"),
        ({"compute_capability": ("12", 0)}, "compute_capability: got '12'"),
        ({"row_split": -1}, "row_split: got -1"),
        ({"row_split": None}, "row_split: got None"),
        ({"prefill_heads": "64"}, "prefill_heads: got '64'"),
        ({"prefill_heads": 64}, "prefill_heads: got 64"),
        ({"decode_heads": {0}}, "decode_heads: got 0"),
        ({"decode_heads": {"8"}}, "decode_heads: got '8'"),
        ({"decode_topk": {-1}}, "decode_topk: got -1"),
        ({"fork": "mode"}, "fork: got 'mode'"),
        ({"fork": "entry", "row_split": 64}, "row_split: got 64 with fork='entry'"),
    ],
)
def test_capability_is_checked(arguments: dict, match: str) -> None:
    default = {
        "family": "x",
        "compute_capability": (12, 0),
        "row_split": 0,
        "prefill_heads": {64},
        "decode_heads": {64},
    }
    with pytest.raises((ValueError, TypeError), match=match):
        Capability(**{**default, **arguments})


def test_containers_sources_and_hashing() -> None:
    listed = Capability("x", (9, 0), 0, [8, 16], (), sources={"heads": "a table"}, problems=["p"])
    assert listed.prefill_heads == {8, 16}
    assert listed.source("heads") == "a table"
    assert listed.source("row_split") == "not stated"
    assert Capability("x", (9, 0), 0, Even(), ()).prefill_heads == set(range(2, 129, 2))
    assert len({listed, Capability.unreadable("y", None, "why"), Policy.native(), Call(1, 1, 1)}) == 4
    for frozen in (listed, Call(1, 1, 1), Policy.native(), plan_width(Call(1, 8, 64), listed, Policy.native())):
        with pytest.raises(dataclasses.FrozenInstanceError):
            frozen.rows = 3  # type: ignore[union-attr]


def test_words() -> None:
    from headfit.capability import words

    assert words(range(1, 129)) == "1-128"
    assert words({8, 16, 1, 2}) == "1, 2, 8, 16"
    assert words(()) == "nothing"


def test_the_gate_imports_no_torch() -> None:
    code = "import sys, headfit.width, headfit.env; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
