"""Turns (rl T1-T3, I13)."""

from __future__ import annotations

from typing import Any

import pytest

import phloem
from phloem import rl
from phloem.runtime.engine.build import load_tokenizer
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.models.loader import open_model
from phloem.runtime.request import SamplingParams
from tests.rl.tiny import fields_of

SYSTEM = {"role": "system", "content": "You are terse."}
USER, AGAIN = {"role": "user", "content": "Say hello."}, {"role": "user", "content": "And 17 + 25?"}
TOOL = {"role": "tool", "content": "42\n"}


@pytest.fixture(scope="module")
def smollm() -> Any:
    engine = rl.RolloutEngine(None, kv_tokens=4096)
    yield engine
    engine.check()
    engine.close()


@pytest.mark.case("C-RL-08")
@pytest.mark.parametrize("opening", [[USER], [SYSTEM, USER]], ids=["plain", "system"])
@pytest.mark.parametrize("follow", [AGAIN, TOOL], ids=["user", "tool"])
@pytest.mark.parametrize("ending", ["eos", "length"])
def test_T2_I13_incremental_ids_are_the_templates_of_the_whole(smollm, opening, follow, ending):
    tokenizer = smollm.tokenizer
    limit = {"eos": 120, "length": 3}[ending]
    with smollm.open_session(messages=opening, seed=1) as session:
        assert session.ids == phloem.runtime.text.chat.encode_chat(tokenizer, opening)
        turn = session.generate(SamplingParams(max_tokens=limit, temperature=0.0))
        if ending == "eos" and turn.finish != "eos":
            pytest.skip("this prompt does not end by itself")
        session.tool([follow])
        second = session.generate(SamplingParams(max_tokens=4, temperature=0.0))
        drawn = turn.output_ids[:-1] if turn.finish == "eos" else turn.output_ids
        text = tokenizer.decode(drawn, skip_special_tokens=False)
        whole = [*opening, {"role": "assistant", "content": text}, follow]
        expected = phloem.runtime.text.chat.encode_chat(tokenizer, whole)
        assert session.ids[: -len(second.output_ids)] == expected
        sample = session.sample()
        sample.check()
        assert sample.token_ids == session.ids and len(sample.spans) == 2
        trained = [t for t, m in zip(sample.output_ids, sample.loss_mask) if m]
        assert trained == turn.output_ids + second.output_ids  # a drawn EOS counts, the template's line break does not
        if turn.finish == "eos":
            at = len(turn.output_ids)
            assert sample.loss_mask[at - 1 : at + 1] == [1, 0]
        assert second.cached_tokens >= len(second.prompt_ids) - len(second.prompt_ids[len(turn.token_ids) :]) - 16


def test_T1_a_session_of_ids_is_one_flat_request(attached):
    _, engine = attached()
    options = SamplingParams(max_tokens=5, ignore_eos=True, top_p=0.9)
    session = engine.open_session([1, 5, 6], seed=4)
    first = session.generate(options)
    session.append([40, 41, 42])
    second = session.generate(options)
    assert session.ids == [1, 5, 6, *first.output_ids, 40, 41, 42, *second.output_ids]
    assert second.prompt_ids == session.ids[:-5] and second.cached_tokens >= 7
    whole = session.sample()
    assert whole.loss_mask == [1] * 5 + [0] * 3 + [1] * 5
    flat = engine.score([session.ids], from_position=3, support=[whole.support])[0]
    assert [t.logprob for t, m in zip(flat, whole.loss_mask) if m] == [
        v for v, m in zip(whole.logprobs_model, whole.loss_mask) if m
    ]
    assert [t.sampled for t, m in zip(flat, whole.loss_mask) if m] == [
        v for v, m in zip(whole.logprobs_sampled, whole.loss_mask) if m
    ]
    session.append([7], trainable=True)
    assert session.sample().loss_mask[-1] == 1 and session.sample().logprobs_model[-1] < 0
    session.close()
    session.close()


def test_T1_forks_share_what_is_cached_and_draw_apart(attached):
    _, engine = attached()
    session = engine.open_session([1, *range(5, 40)], seed=4)
    session.generate(SamplingParams(max_tokens=3, ignore_eos=True))
    branches = session.fork(4)
    turns = [b.generate(SamplingParams(max_tokens=8, ignore_eos=True)) for b in branches]
    assert len({tuple(t.output_ids) for t in turns}) == 4
    assert all(t.cached_tokens == len(t.prompt_ids) - 1 for t in turns[1:])
    again = engine.open_session([1, *range(5, 40)], seed=4)
    again.generate(SamplingParams(max_tokens=3, ignore_eos=True))
    assert [fields_of(b.generate(SamplingParams(max_tokens=8, ignore_eos=True))) for b in again.fork(4)] == [
        fields_of(t) for t in turns
    ]
    for s in (session, again, *branches):
        s.close()


def test_a_session_says_what_it_was_opened_without(attached):
    _, engine = attached()
    with pytest.raises(InvalidRequestError, match="one of them"):
        engine.open_session()
    with pytest.raises(InvalidRequestError, match="tokenizer"):
        engine.open_session(messages=[USER])
    with engine.open_session([1]) as session:
        with pytest.raises(InvalidRequestError, match="opened with ids"):
            session.tool([USER])
        session.generate({"max_tokens": 2})
        with pytest.raises(InvalidRequestError, match="one temperature"):
            session.generate({"max_tokens": 2, "temperature": 0.5})


def test_rewrites_tells_whether_the_template_changes_the_past(smollm):
    qwen = "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    assert not smollm.open_session(messages=[USER]).rewrites
    assert smollm.open_session(messages=[USER], template=qwen + "{% if add_generation_prompt %}A:{% endif %}").rewrites
    assert load_tokenizer(open_model(None)).templates
