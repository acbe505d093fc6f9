"""TRL's GRPOTrainer, with its completions from a RolloutEngine. Two routes; config: GRPOConfig(use_vllm=False, use_cpu=True, bf16=False).

A   GRPOTrainer(…, rollout_func=make_rollout_func(engine))     TRL's own hook, marked experimental
B   install(trainer, engine)                                   stands where TRL's vLLM client would; importance correction, tools

Both give TRL `sampled + logmass`: TRL recomputes over the full vocabulary, so under truncation or a grammar `sampled` alone would make
its importance ratio the support's mass (rl §9). Either way TRL trains the unmasked policy; only `rl.token_logprobs` with the support
trains the one that was drawn from. This is said once, as a warning, when something is cut.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from phloem.runtime.errors import ConfigError, InvalidRequestError
from phloem.runtime.request import GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from phloem.runtime.rl.engine import RolloutEngine
    from phloem.runtime.rl.sample import RolloutBatch

__all__ = ["Backend", "install", "make_rollout_func", "sampling_of"]

_CUTS = (
    "TRL recomputes logprobs over the full vocabulary, so it trains the policy without the grammar or truncation that these rollouts are "
    "drawn under; its numbers are consistent (sampled + logmass). To train the policy that is drawn from, use rl.token_logprobs in a loop of "
    "your own."
)


def sampling_of(args: Any) -> SamplingParams:
    """GRPOConfig's sampling. Raises InvalidRequestError for penalties, which no trainer recomputes (rl L5)."""
    if getattr(args, "repetition_penalty", 1.0) not in (None, 1.0):
        raise InvalidRequestError(
            f"repetition_penalty is {args.repetition_penalty}: TRL recomputes without it, so gradients would be of another policy. Set it to 1.0.",
            param="repetition_penalty",
        )
    return SamplingParams(
        max_tokens=args.max_completion_length, temperature=args.temperature, top_p=getattr(args, "top_p", None) or 1.0,
        top_k=max(getattr(args, "top_k", None) or 0, 0), min_p=getattr(args, "min_p", None) or 0.0,
    )  # fmt: skip


def make_rollout_func(
    engine: RolloutEngine, *, grammar: GrammarSpec | str | None = None, extra: Callable[[RolloutBatch], Mapping[str, Sequence[Any]]] | None = None,
    **constraint: Any,
) -> Callable[[list[Any], Any], dict[str, Any]]:  # fmt: skip
    """Route A. extra: further columns for the reward functions, one value a sample.   grammar, GrammarOptions: as for `rollout`."""
    source = Backend(engine, grammar, constraint)

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if getattr(trainer, "tools", None):
            raise ConfigError(
                "TRL would generate later turns of tools= with transformers; use install(trainer, engine) for tools.",
                param="tools",
            )
        source.commit(trainer)
        batch = source.draw(ids_of(prompts, trainer.processing_class), trainer.args)
        found: dict[str, Any] = {**batch.to_trl(), **(extra(batch) if extra is not None else {})}
        return found

    return rollout_func


def install(trainer: Any, engine: RolloutEngine, *, grammar: GrammarSpec | str | None = None, **constraint: Any) -> Backend:
    """Route B: `trainer`, built with use_vllm=False, generates with the engine from now on. Call it before `trainer.train()`.

    Rests on private fields of TRL, so it looks first, and raises ConfigError where they are not what it knows (1.16 is tested).
    """
    lacking = [n for n in ("use_vllm", "vllm_mode", "args", "processing_class", "num_generations") if not hasattr(trainer, n)]
    seam = getattr(getattr(type(trainer), "_generate_single_turn", None), "__code__", None)
    read = seam.co_names if seam is not None else ()
    lacking += [name for name in ("vllm_generation", "_last_loaded_step") if name not in read]
    if lacking:
        raise ConfigError(
            f"TRL {version('trl')} has no {', '.join(lacking)} where its generation backend was; use make_rollout_func(engine), TRL's own hook.",
            param="trainer",
        )
    if trainer.use_vllm:
        raise ConfigError("build the trainer with use_vllm=False; install() then takes vLLM's place.", param="use_vllm")
    backend = Backend(engine, grammar, constraint)
    backend.trainer = trainer
    trainer.vllm_generation, trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = backend, True, "server", -1
    trainer.args.use_vllm = True
    return backend


class Backend:
    """What TRL's vLLM object is to it: `sync_weights()`, and `generate(prompts, images, num_generations, profiler)`."""

    def __init__(self, engine: RolloutEngine, grammar: GrammarSpec | str | None, constraint: Mapping[str, Any]) -> None:
        self.engine, self._grammar, self._constraint = engine, grammar, dict(constraint)
        self.trainer: Any = None
        self._calls, self._told = 0, False

    def commit(self, trainer: Any) -> None:
        """Before each generation; TRL may generate several times a step, with the same weights."""
        attached = self.engine._attached
        if attached is None or not attached.is_shared or attached.changed():
            self.engine.commit()

    def draw(self, prompts: list[list[int]], args: Any) -> RolloutBatch:
        """prompts: repeated num_generations times in a row, as TRL hands them over; as many Samples come back."""
        sampling = sampling_of(args)
        self._calls += 1
        seed = getattr(args, "seed", 0) * 1_000_003 + self._calls
        batch = self.engine.rollout(prompts, sampling, grammar=self._grammar, seed=seed, **self._constraint)
        if not self._told and any(m != 0.0 for s in batch for m in s.support_logmass):
            self._told = True
            warnings.warn(_CUTS, stacklevel=2)
        return batch

    def sync_weights(self) -> None:
        self.commit(self.trainer)

    def generate(
        self, prompts: list[Any], images: Any = None, num_generations: int = 1, profiler: Any = None, **unknown: Any
    ) -> tuple[Any, ...]:
        """(prompt ids, completion ids, [[[logprob]]], [[[id]]]), one a prompt as they were given."""
        if images is not None and any(image is not None for image in images):
            raise InvalidRequestError("images need a model that reads them; this engine serves text.", param="images")
        ids = [list(p) if p and isinstance(p[0], int) else ids_of([p], self.trainer.processing_class)[0] for p in prompts]
        batch = self.draw(ids, self.trainer.args)
        given = batch.to_trl()
        logprobs = [[[value] for value in row] for row in given["logprobs"]]
        return ids, given["completion_ids"], logprobs, [[[token] for token in row] for row in given["completion_ids"]]


def ids_of(prompts: list[Any], processor: Any) -> list[list[int]]:
    """Token ids of TRL's prompts: text, messages, or ids already, by the trainer's own tokenizer."""
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = processor(prompt)["input_ids"]
        elif prompt and isinstance(prompt[0], Mapping):
            ids = processor.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True)
            ids = ids["input_ids"] if isinstance(ids, Mapping) else ids
        else:
            ids = prompt
        found.append([int(t) for t in (ids[0] if ids and isinstance(ids[0], list) else ids)])
    return found
