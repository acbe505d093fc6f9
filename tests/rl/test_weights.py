"""Weights and versions: commit, update, what is in flight (rl W1-W6, I7-I9; G5, G6)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from phloem import rl
from phloem.runtime.errors import (
    EngineBusyError,
    InvalidRequestError,
    StaleVersionError,
    UncommittedWeightsError,
    WeightLayoutError,
    WeightsInvalidError,
)
from phloem.runtime.request import SamplingParams
from tests.rl.tiny import fields_of, nudge, text_tokenizer, tiny_module
from tests.tiny_models import tiny_config, tiny_tensors, write_hf

PROMPTS = [[1, 5, 6, 7, 8], [1, 20]]
LONG = SamplingParams(max_tokens=120, ignore_eos=True)


def rolled(engine: rl.RolloutEngine) -> list[tuple[Any, ...]]:
    return [fields_of(s) for s in engine.rollout(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True), n=2, seed=0)]


def moved(module: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    """A state dict some way from the module's."""
    generator = torch.Generator().manual_seed(seed)
    return {k: v * 1.01 + 0.05 * torch.randn(v.shape, generator=generator) for k, v in module.state_dict().items()}


def fresh(attached: Any, state: dict[str, torch.Tensor], **of: Any) -> list[tuple[Any, ...]]:
    module = tiny_module(**of)
    module.load_state_dict(state)
    _, engine = attached(module, share="copy")
    return rolled(engine)


# ---- commit (W1-W3) ----------------------------------------------------------------------------------------------------------


def test_W1_versions_only_grow_and_the_same_again_is_nothing_unless_something_changed(attached):
    module, engine = attached()
    assert engine.commit() == 1 and engine.commit(version=7) == 7
    for stale in (3, 6):
        with pytest.raises(StaleVersionError, match="only grow"):
            engine.commit(version=stale)
    assert engine.version == 7 and engine.commit(version=7, label="step 7") == 7 and engine.stats().label == "step 7"
    nudge(module)
    with pytest.raises(StaleVersionError, match="changed since"):
        engine.commit(version=7)
    assert engine.commit(version=8) == 8
    for step in (0, 0, 1, 1):  # as TRL calls it: several generations a step
        assert engine.commit(version=8 + step) == 8 + step


def test_W1_the_same_version_in_copy_mode_compares_the_values(attached):
    module, engine = attached(share="copy")
    assert engine.commit(version=1) == 1 and engine.commit(version=1) == 1
    nudge(module)
    with pytest.raises(StaleVersionError):
        engine.commit(version=1)


@pytest.mark.case("C-RL-03")
def test_W2_a_commit_needs_no_flush_and_old_prefixes_cannot_be_hit(attached):
    _module, engine = attached()
    prompt = [1, *range(3, 60)]
    engine.rollout([prompt], SamplingParams(max_tokens=2))
    assert engine.explain(prompt).num_cached == 57
    engine.commit()
    assert engine.explain(prompt).num_cached == 0
    (s,) = engine.rollout([prompt], SamplingParams(max_tokens=2))
    assert s.cached_tokens == 0 and s.spans[0].version == 1
    assert engine.explain(prompt).num_cached == 57


@pytest.mark.case("C-RL-04")
def test_W2_a_label_or_a_version_aborts_nothing(attached):
    _, engine = attached()
    expected = [s.output_ids for s in engine.rollout(PROMPTS, LONG, n=4, seed=1)]
    handle = engine.submit(PROMPTS, LONG, n=4, seed=1)
    with pytest.raises(EngineBusyError, match="say what is to become of them"):
        while not handle.done:
            engine.commit(label="v2")
    engine.commit(in_flight="recompute", label="v2")  # the same weights: the same tokens
    batch = handle.result(60)
    assert [s.output_ids for s in batch] == expected and {s.finish for s in batch} == {"length"}
    assert engine.stats().label == "v2"


def test_W3_an_exception_in_training_commits_nothing(attached):
    module, engine = attached()
    with pytest.raises(ZeroDivisionError), engine.training():
        1 / 0  # noqa: B018
    assert engine.version == 0 and rolled(engine)
    with pytest.raises(ZeroDivisionError), engine.training():
        nudge(module)
        1 / 0  # noqa: B018
    with pytest.raises(UncommittedWeightsError, match="changed since the last commit"):
        rolled(engine)
    engine.commit()
    with engine.training():
        for call in (
            lambda: engine.rollout(PROMPTS),
            lambda: engine.score([[1, 2]]),
            lambda: engine.commit(),
            lambda: engine.suspend(),
        ):
            with pytest.raises(EngineBusyError, match="training"):
                call()
    assert engine.version == 2


# ---- update (W4, W5, I8, I9, G6) -------------------------------------------------------------------------------------------------


@pytest.mark.case("C-RL-11")
@pytest.mark.parametrize("tied", [False, True])
def test_W4_I9_any_order_and_bucket_size_is_a_fresh_engine(attached, tied, tmp_path):
    of = {"tie_word_embeddings": tied}
    module, engine = attached(of=of, share="copy")
    new = moved(module)
    if tied:
        new["lm_head.weight"] = new["model.embed_tokens.weight"]
    expected = fresh(attached, new, **of)
    digest = None
    save_file({k: v.clone() for k, v in new.items() if not (tied and k == "lm_head.weight")}, tmp_path / "model.safetensors")
    items = list(new.items())
    rng = random.Random(3)
    shuffled = rng.sample(items, len(items))
    ways: list[Any] = [[new], [[pair] for pair in shuffled], [shuffled[i : i + 3] for i in range(0, len(items), 3)]]
    ways += [[shuffled[i : i + 10] for i in range(0, len(items), 10)], [str(tmp_path)], [tmp_path / "model.safetensors"]]
    ways += [[(dict([pair]) for pair in items)]]
    if tied:
        ways += [[[p for p in items if p[0] != "lm_head.weight"]], [[p for p in items if p[0] != "model.embed_tokens.weight"]]]
    for version, buckets in enumerate(ways, 1):
        with engine.update(version * 10) as u:
            for bucket in buckets:
                u.load(bucket)
        assert u.version == engine.version == version * 10
        assert rolled(engine) == expected
        digest = digest or engine.digest()
        assert engine.digest() == digest
        nudged = moved(module, seed=version + 5)
        if tied:
            nudged["lm_head.weight"] = nudged["model.embed_tokens.weight"]
        with engine.update() as u:
            u.load(nudged)
        assert rolled(engine) != expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_W4_engines_with_weights_of_their_own_take_a_trainers_names(engines, attached, family, tmp_path):
    config = tiny_config(family)
    engine = rl.RolloutEngine(str(text_tokenizer(write_hf(tmp_path, config))), kv_tokens=1024, threads=1)
    engines.append(engine)
    new = tiny_tensors(config, seed=4)
    before = rolled(engine)
    with engine.update() as u:
        u.load(new)
    assert rolled(engine) != before
    other = rl.RolloutEngine(str(text_tokenizer(write_hf(tmp_path / "b", config, new))), kv_tokens=1024, threads=1)
    engines.append(other)
    assert rolled(engine) == rolled(other) and engine.digest() == other.digest()
    assert all(torch.equal(engine.state_dict()[k], v) for k, v in new.items())


def test_I8_G6_an_exception_at_every_tensor_leaves_the_old_version_bit_for_bit(attached):
    module, engine = attached(share="copy")
    before, digest, new = rolled(engine), engine.digest(), list(moved(module).items())
    for at in range(len(new) + 1):
        with pytest.raises(ZeroDivisionError), engine.update() as u:
            for pair in new[:at]:
                u.load([pair])
            1 / 0  # noqa: B018
        assert engine.version == 0
        if at % 5 == 0 or at == len(new):
            assert engine.digest() == digest and rolled(engine) == before
    with engine.update() as u:
        u.load(new)
    assert rolled(engine) == fresh(attached, dict(new))


def test_W4_what_does_not_fit_is_refused_before_a_byte_of_it_is_written(attached):
    module, engine = attached(share="copy")
    new, before = moved(module), rolled(engine)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"model.norm.wait": torch.zeros(64)}, "unexpected  model.norm.wait"),
        ({"model.norm.weight": torch.zeros(65)}, r"wrong shape model.norm.weight: \[65\], expected \[64\]"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}, "wrong dtype model.norm.weight"),
        ({}, r"missing     model.embed_tokens.weight \[96, 64\]"),
    ]
    for tensors, message in bad:
        with pytest.raises(WeightLayoutError, match=message), engine.update() as u:
            u.load(tensors)
        assert rolled(engine) == before
    with pytest.raises(WeightLayoutError, match="twice"), engine.update() as u:
        u.load(new)
        u.load({"model.norm.weight": new["model.norm.weight"]})
    with pytest.raises(InvalidRequestError, match="state dict"), engine.update() as u:
        u.load([1, 2])
    with pytest.raises(StaleVersionError), engine.update(version=0) as u:
        u.load(new)
    with pytest.raises(EngineBusyError, match="inside update"), engine.update() as u, engine.update():
        pass
    assert rolled(engine) == before and engine.version == 0


def test_W4_a_tied_pair_that_differs_is_refused(attached):
    module, engine = attached(of={"tie_word_embeddings": True}, share="copy")
    new = moved(module)
    new["lm_head.weight"] = new["model.embed_tokens.weight"] + 1
    with pytest.raises(WeightLayoutError, match="tied"), engine.update() as u:
        u.load(new)


def test_W4_a_partial_update_keeps_the_rest(attached):
    module, engine = attached(share="copy")
    first, second = moved(module, 1), moved(module, 2)
    for state, names in ((first, list(first)[::2]), (second, ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])):
        with engine.update(partial=True) as u:
            u.load({name: state[name] for name in names})
    expected = {k: v.clone() for k, v in module.state_dict().items()}
    expected |= {name: first[name] for name in list(first)[::2]}
    expected |= {name: second[name] for name in ("model.layers.1.self_attn.k_proj.weight", "model.norm.weight")}
    assert rolled(engine) == fresh(attached, expected)


def test_W5_in_place_never_serves_a_mixture(attached):
    module, engine = attached(share="copy", staging="none")
    new = moved(module)
    names = {k: tuple(v.shape) for k, v in new.items()}
    with pytest.raises(WeightLayoutError, match="names="), engine.update():
        pass
    with pytest.raises(WeightLayoutError, match="missing"), engine.update(names={"model.norm.weight": (64,)}):
        pass
    assert rolled(engine)
    with pytest.raises(ZeroDivisionError), engine.update(names=names) as u:
        u.load(list(new.items())[:5])
        1 / 0  # noqa: B018
    with pytest.raises(WeightsInvalidError, match="mixed"):
        rolled(engine)
    with engine.update(names=names) as u:
        u.load(new)
    assert rolled(engine) == fresh(attached, new)


def test_shared_weights_take_no_update(attached):
    _, engine = attached()
    with pytest.raises(WeightLayoutError, match="trainer's own"), engine.update():
        pass


def test_quantised_engines_take_float_updates(engines, tmp_path):
    config = tiny_config("llama", hidden_size=64, intermediate_size=96)
    folder = text_tokenizer(write_hf(tmp_path, config))
    new = tiny_tensors(config, seed=4)
    engine = rl.RolloutEngine(str(folder), dtype="q8", kv_tokens=1024, threads=1)
    other = rl.RolloutEngine(str(text_tokenizer(write_hf(tmp_path / "b", config, new))), dtype="q8", kv_tokens=1024, threads=1)
    engines += [engine, other]
    with engine.update() as u:
        u.load(new)
    assert rolled(engine) == rolled(other)


# ---- in flight (W6, I7, C-RL-12) -----------------------------------------------------------------------------------------------


def started(engine: rl.RolloutEngine, n: int = 4) -> rl.Handle:
    handle = engine.submit(PROMPTS, LONG, n=n, seed=1)
    while engine.stats().engine.decode_tokens < 20 and not handle.done:
        pass
    return handle


@pytest.mark.parametrize("policy", ["finish", "abort", "recompute", "continue"])
@pytest.mark.parametrize("mode", ["shared", "copy"])
def test_W6_what_becomes_of_requests_in_flight(attached, policy, mode):
    module, engine = attached(share="require" if mode == "shared" else "copy", kv_tokens=8192)
    _, quiet = attached(tiny_module(), kv_tokens=8192)
    whole = quiet.rollout(PROMPTS, LONG, n=4, seed=1)
    handle = started(engine)
    if mode == "shared":
        with engine.training(in_flight=policy):
            nudge(module, scale=0.3)
    else:
        nudge(module, scale=0.3)
        with engine.update(in_flight=policy) as u:
            u.load(module.state_dict())
    batch = handle.result(60)
    for s, w in zip(batch, whole):
        s.check()
        v0 = next((span.end for span in s.spans if span.version == 0), 0)
        assert s.output_ids[:v0] == w.output_ids[:v0] and s.logprobs_model[:v0] == w.logprobs_model[:v0]
        if policy == "finish":
            assert {span.version for span in s.spans} <= {0, 1} and len(s.spans) == 1 and s.finish == "length"
        elif policy == "abort":
            assert (
                s.finish in ("abort", "length")
                and {span.version for span in s.spans} <= {0}
                and s.partial == (s.finish == "abort")
            )
        else:
            assert s.finish == "length" and len(s.output_ids) == 120
            assert s.kv_mixed == (policy == "continue" and v0 < 120)
    if policy in ("recompute", "abort"):
        going_on = list(batch) if policy == "abort" else []
        resumed = engine.rollout(going_on, LONG) if going_on else batch
        for s in resumed:
            v0 = next((span.end for span in s.spans if span.version == 0), 0)
            (found,) = engine.score([s.token_ids], from_position=len(s.prompt_ids) + v0) if v0 < 120 else ([],)
            assert [t.logprob for t in found] == s.logprobs_model[v0:]  # I7: of the new weights, from KV of the new weights
    if policy == "continue":
        mixed = [s for s in batch if s.kv_mixed]
        assert mixed
        assert engine.explain(mixed[0].token_ids).num_cached <= len(mixed[0].prompt_ids) + 16


def test_W6_without_a_policy_a_commit_names_who_is_in_flight(attached):
    _, engine = attached()
    handle = started(engine)
    with pytest.raises(EngineBusyError, match=r"8 requests are under way \(rl"):
        engine.commit()
    handle.cancel()
    handle.result(60)
    assert engine.commit() == 1


@pytest.mark.case("C-RL-12")
@pytest.mark.parametrize("delay_tokens", [0, 1, 40])
def test_W6_abort_ends_running_and_queued_ones_once_each(attached, delay_tokens):
    _, engine = attached(max_running=2)
    handles = [engine.submit([[1, 5 + i]], LONG, seed=i) for i in range(6)]
    while engine.stats().engine.decode_tokens < delay_tokens:
        pass
    engine.pause(in_flight="abort")
    late = engine.submit([[1, 77]], SamplingParams(max_tokens=4), seed=0)
    samples = [h.result(60)[0] for h in handles]
    assert {s.finish for s in samples} <= {"abort", "length"}
    for s in samples:
        s.check()
    assert sum(not s.output_ids for s in samples) >= 3 or delay_tokens
    assert not late.done
    engine.unpause()
    assert late.result(60)[0].finish in ("length", "eos")  # queued, not lost
    resumed = engine.rollout(list(samples), LONG)
    assert [s.output_ids for s in resumed] == [engine.rollout([[1, 5 + i]], LONG, seed=i)[0].output_ids for i in range(6)]


@pytest.mark.case("C-RL-03")
@pytest.mark.parametrize("rounds", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_I7_G5_random_commits_under_load_mix_nothing_unless_it_is_said(attached, rounds):
    """Each version's weights are told apart by their logits: a token's model logprob is that of exactly one version."""
    module, engine = attached(kv_tokens=2048, max_running=16)
    rng, handles = random.Random(rounds), list[rl.Handle]()
    state = {0: {k: v.clone() for k, v in module.state_dict().items()}}
    base = state[0]
    for version in range(1, rounds + 1):
        handles.append(
            engine.submit(
                [[1, rng.randint(3, 90), rng.randint(3, 90)]],
                SamplingParams(max_tokens=rng.randint(4, 60), ignore_eos=True),
                n=3,
            )
        )
        policy = rng.choice(["finish", "abort", "recompute", "continue"])
        with engine.training(in_flight=policy), torch.no_grad():
            factor = 1.0 + 0.5 * (version % 7) / 7
            module.lm_head.weight.copy_(base["lm_head.weight"] * factor)
            module.model.layers[0].mlp.down_proj.weight.copy_(base["model.layers.0.mlp.down_proj.weight"] * (2.0 - factor))
        state[version] = {}
    samples = [s for h in handles for s in h.result(120)]
    by_factor: dict[int, list[tuple[rl.Sample, int, int]]] = {}
    for s in samples:
        s.check()
        assert s.finish in ("length", "abort")
        assert all(a.end == b.start and a.version < b.version for a, b in zip(s.spans, s.spans[1:]))
        if not s.kv_mixed:
            for span in s.spans:
                by_factor.setdefault(span.version % 7, []).append((s, span.start, span.end))
    assert any(s.kv_mixed for s in samples) and any(len(s.spans) > 1 and not s.kv_mixed for s in samples)
    for kind, spans in by_factor.items():
        factor = 1.0 + 0.5 * kind / 7
        with engine.training(), torch.no_grad():
            module.lm_head.weight.copy_(base["lm_head.weight"] * factor)
            module.model.layers[0].mlp.down_proj.weight.copy_(base["model.layers.0.mlp.down_proj.weight"] * (2.0 - factor))
        ids = [s.token_ids[: len(s.prompt_ids) + end] for s, _, end in spans]  # every one of them
        scored = engine.score(ids, from_position=[len(s.prompt_ids) + start for s, start, _ in spans])
        for (s, start, end), found in zip(spans, scored):
            assert [t.logprob for t in found] == s.logprobs_model[start:end], (s.spans, start, end)
