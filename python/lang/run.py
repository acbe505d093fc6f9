"""Programs, and runs of them (U1, U2). A body runs once and records; what it reads makes the engine work.

@function
def triage(s, mail): …
triage.run(mail="…")            in the caller's thread          await explore(goal="…")      on the current loop
triage.run_batch([{…}, …])      one thread, a greenlet a body   triage.plan(mail="…")        no forward is run
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from phloem.lang import ir
from phloem.lang.backend import Backend, as_backend
from phloem.lang.defaults import default_backend, default_template
from phloem.lang.ir import caller, located
from phloem.lang.result import Run
from phloem.lang.session import Plan, Session
from phloem.lang.state import AsyncState, BaseState, Scope, State
from phloem.runtime.errors import Cancelled, InvalidRequestError, ProgramError
from phloem.runtime.text.markup import Markup

__all__ = ["Program", "Run", "function"]

P = ParamSpec("P")
T = TypeVar("T")

SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "stop",
    "stop_token_ids", "ignore_eos", "skip_special_tokens",
)  # fmt: skip
HOW = ("backend", "seed", "stream", "timeout", "compile", "namespace", "history", "chat_template", "template_variables")


class Program(Generic[P, T]):
    """A function of a state and arguments. Made by `@function`."""

    def __init__(self, fn: Callable[..., Any], *, control_text: bool = False, num_api_spec_tokens: int | None = None, bound: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        self.fn, self.control_text, self.num_api_spec_tokens = fn, control_text, num_api_spec_tokens
        self.bound = dict(bound or {})
        self.is_async = inspect.iscoroutinefunction(fn)
        self.name = fn.__name__
        code = fn.__code__
        self.at = f"{code.co_filename}:{code.co_firstlineno}"
        self.__doc__, self.__name__, self.__wrapped__ = fn.__doc__, fn.__name__, fn
        self.signature = inspect.signature(fn)
        names = list(self.signature.parameters)
        if not names:
            raise TypeError(f"{self.name}() takes no state: the first parameter of a program is its state.")
        self.arg_names = names[1:]

    # ---- calling --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state first: inlined on it (K5). Else as `run`; for an `async def` program: awaitable, a Run."""
        if args and isinstance(args[0], BaseState):
            return self._inline(args[0], args[1:], kwargs)
        if self.is_async:
            return self.arun(*args, **kwargs)
        return self.run(*args, **kwargs)

    def _inline(self, state: BaseState, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.is_async and isinstance(state, State):
            raise located(ProgramError(f"{self.name} is async; a `def` program cannot call it on its state."), caller())
        if not self.is_async and isinstance(state, AsyncState):
            raise located(
                ProgramError(f"{self.name} is a `def` program; on the state of an async one it could not wait. Make it async."),
                caller(),
            )
        view = type(state)(state._path, Scope(state._scope), state.run)
        return self.fn(view, *args, **{**self.bound, **kwargs})

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """kwargs -> arguments of the body, sampling defaults, how to run. A name that the body takes is the body's."""
        own, sampling, how = dict(self.bound), {}, {}
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.signature.parameters.values())
        for name, value in kwargs.items():
            if name in self.arg_names:
                own[name] = value
            elif name in SAMPLING:
                sampling[name] = value
            elif name == "max_new_tokens":
                sampling["max_tokens"] = value
            elif name in ("return_logprob", "top_logprobs_num"):
                if value:
                    sampling["logprobs"] = "model"
                if name == "top_logprobs_num" and value:
                    sampling["top_logprobs"] = value
            elif name in ("logprob_start_len", "return_text_in_logprobs", "use_thread"):
                if name == "logprob_start_len" and value is not None:
                    raise located(
                        InvalidRequestError(f"logprob_start_len is not supported: {ir._REFUSED[name]}.", param=name), caller()
                    )
            elif name in HOW:
                how[name] = value
            elif takes_any:
                own[name] = value
            else:
                raise TypeError(f"{self.name}() has no parameter {name!r}, and running it takes no option of that name.")
        sampling = {k: v for k, v in sampling.items() if v is not None}
        ir.checked_sampling(sampling)
        return own, sampling, how

    def _session(self, how: Mapping[str, Any], dry: bool = False) -> Session:
        backend = how.get("backend")
        found: Backend = as_backend(backend if backend is not None else default_backend())
        if self.num_api_spec_tokens is not None and not found.capabilities.tokens:
            raise located(
                InvalidRequestError(
                    "num_api_spec_tokens is not supported: it would bill text twice.", param="num_api_spec_tokens"
                ),
                self.at,
            )
        traced = getattr(found, "seed", None)
        if traced is not None and isinstance(how, dict):
            how.setdefault("seed", traced)  # a replay draws as the run that it answers from did
        markup = None
        if found.tokenizer is not None:
            markup = Markup(
                found.tokenizer, template=how.get("chat_template", default_template()), variables=how.get("template_variables")
            )
        return Session(found, markup, compile=how.get("compile", True), dry=dry)

    def _run(self, session: Session, number: int, sampling: dict[str, Any], how: Mapping[str, Any], seed: int) -> Run[T]:
        history = how.get("history", "template")
        if history not in ("template", "append"):
            raise located(
                InvalidRequestError(f"history is {history!r}; expected 'template' or 'append'.", param="history"), caller()
            )
        return Run(
            self, session, number=number, seed=seed, defaults=sampling, namespace=how.get("namespace", ""), history=history,
            streaming=bool(how.get("stream", False)), timeout=how.get("timeout"), is_async=self.is_async,
        )  # fmt: skip

    def run(self, *args: Any, **kwargs: Any) -> Run[T]:
        """Run to the end, in this thread (U1).

        kwargs: arguments of the body; sampling defaults (temperature, max_new_tokens, stop, …), where a gen's own win; backend=, seed=,
        timeout= (seconds), stream=True (returns at once; the run goes on while it is read), compile=False (Y4), namespace=, history= (H5).
        Raises what the body raised, or what failed in it and was not read.
        """
        import asyncio

        own, sampling, how = self._split(kwargs)
        if self.is_async:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(self.arun(*args, **kwargs))
            raise located(
                ProgramError(f"{self.name} is async and a loop is running here: `await {self.name}(…)` instead of run()."),
                caller(),
            )
        session = self._session(how)
        run = self._run(session, 0, sampling, how, _seed(how))
        if run.streaming:
            return self._start_streaming(run, args, own)
        try:
            self._body(run, args, own)
            session.wait(lambda: run.num_active == 0 or run._failure() is not None)
            run._conclude()
        except BaseException as error:
            run._raised = error
            run._abandon(Cancelled("its program has failed."))
            raise
        finally:
            session.close()
        if run._raised is not None:
            raise run._raised
        return run

    def _body(self, run: Run[T], args: Sequence[Any], own: Mapping[str, Any]) -> None:
        run._value = self.fn(run.state, *args, **own)
        run._body_done = True
        run.state._path.final = True
        run._session.flush()

    def _body_recorded(self, run: Run[T], args: Sequence[Any], own: Mapping[str, Any]) -> None:
        """As `_body`; what it recorded is sent when every body of the batch has recorded."""
        run._value = self.fn(run.state, *args, **own)
        run._body_done = True
        run.state._path.final = True

    def _start_streaming(self, run: Run[T], args: Sequence[Any], own: Mapping[str, Any]) -> Run[T]:
        import greenlet

        session = run._session
        session.hub = greenlet.getcurrent()

        def body() -> None:
            self._body(run, args, own)
            session.wait(lambda: run.num_active == 0 or run._failure() is not None, run)  # type: ignore[arg-type]

        def ended(result: Any) -> None:
            if isinstance(result, BaseException):
                run._raised = result
                run._abandon(Cancelled("its program has failed."))
            else:
                run._conclude()
            session.close()

        run._greenlet = session.spawn(body, ended)
        while session.runnable:
            session._switch(session.runnable.popleft())
        session.flush()
        return run

    async def arun(self, *args: Any, **kwargs: Any) -> Run[T]:
        """Run on the current event loop; a `def` body too, on a greenlet that the loop resumes."""
        own, sampling, how = self._split(kwargs)
        session = self._session(how)
        run = self._run(session, 0, sampling, how, _seed(how))
        return await self._drive(run, args, own, close=True)

    async def _drive(self, run: Run[T], args: Sequence[Any], own: Mapping[str, Any], close: bool) -> Run[T]:
        session = run._session
        try:
            if self.is_async:
                run._value = await self.fn(run.state, *args, **own)
            else:
                run._value = await session.on_loop(lambda: self.fn(run.state, *args, **own))
            run._body_done = True
            run.state._path.final = True
            await session.until(lambda: run.num_active == 0 or run._failure() is not None, run)  # type: ignore[arg-type]
            run._conclude()
        except BaseException as error:
            run._raised = error
            run._abandon(Cancelled("its program has failed."))
            raise
        finally:
            if close:
                session.close()
        if run._raised is not None:
            raise run._raised
        return run

    # ---- batches --------------------------------------------------------------------------------------------------------

    def run_batch(self, batch: Sequence[Any], **kwargs: Any) -> Any:
        """Run once for each of `batch` (mappings of arguments, tuples of them, or Runs' kwargs), on one thread; Runs in order (U2).

        concurrency (num_threads): programs live at once; default: what the KV pool holds.   generator_style=True: an iterator that yields each as it
        ends.   on_error: "raise" ends the batch at the first failure; "return" keeps it in its Run (`run.error()`).   The rest as `run`.
        """
        from phloem.lang.batch import run_batch

        return run_batch(self, batch, kwargs, caller())

    def rollouts(self, engine: Any, args: Sequence[Any], n: int, seed: int, tap: Any, on_error: Any) -> Any:
        """For RolloutEngine.rollout(program, args, n): see lang/rollout.py."""
        from phloem.lang.rollout import rollouts

        return rollouts(self, engine, args, n, seed, tap, on_error)

    # ---- without a forward ----------------------------------------------------------------------------------------------

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """What the first stage would send, and what of it is shared (Y5): a `StagePlan`; print it. No forward is run."""
        from phloem.lang.plan import plan_of

        return plan_of(self, args, kwargs)

    def dry_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Run[T], Plan | None]:
        """The body, up to its first read, against a client that answers nothing; and where it stopped."""
        own, sampling, how = self._split(kwargs)
        session = self._session(how, dry=True)
        run = self._run(session, 0, sampling, how, _seed({"seed": 0, **how}))
        stop: Plan | None = None
        try:
            if self.is_async:
                coroutine = self.fn(run.state, *args, **own)
                try:
                    coroutine.send(None)
                finally:
                    coroutine.close()
            else:
                self.fn(run.state, *args, **own)
        except StopIteration:
            pass
        except Plan as reached:
            stop = reached
        session.flush()
        error = run._failure()
        if error is not None:
            raise error
        return run, stop

    def trace(self, *args: Any, **kwargs: Any) -> Run[T]:
        """SGLang's: the program's nodes, without a backend's answers. A Run that has recorded and read nothing."""
        return self.dry_run(args, kwargs)[0]

    def cache(self, *args: Any, backend: Any = None, **kwargs: Any) -> int:
        """Compute the prefix that all first requests of this program share, so that later runs find it; how many tokens that is."""
        from phloem.lang.plan import warm_prefix

        return warm_prefix(self, args, {**kwargs, **({"backend": backend} if backend is not None else {})})

    def check(self, backend: Any, *args: Any, **kwargs: Any) -> None:
        """Raise BackendUnsupported, at its line, for what this backend cannot do of the first stage (Z1)."""
        self.dry_run(args, {**kwargs, "backend": backend})

    def bind(self, **kwargs: Any) -> Program[P, T]:
        """The program with some arguments given."""
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown:
            raise TypeError(f"{self.name}() has no parameter {unknown[0]!r}.")
        return Program(
            self.fn,
            control_text=self.control_text,
            num_api_spec_tokens=self.num_api_spec_tokens,
            bound={**self.bound, **kwargs},
        )

    def __repr__(self) -> str:
        return f"<program {self.name}>"


def _seed(how: Mapping[str, Any]) -> int:
    """K4: without a run seed one is drawn, and kept in the Run and its trace."""
    seed = how.get("seed")
    if seed is None:
        import secrets

        return secrets.randbits(63)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise located(InvalidRequestError(f"seed is {seed!r}; expected an integer.", param="seed"), caller())
    return seed


@overload
def function(fn: Callable[P, Coroutine[Any, Any, T]], /) -> Program[P, T]: ...
@overload
def function(fn: Callable[P, T], /) -> Program[P, T]: ...
@overload
def function(
    fn: None = None, /, *, control_text: bool = False, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[P, Any]], Program[P, Any]]: ...
def function(fn: Any = None, /, *, control_text: bool = False, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is its state. `async def` makes an async one.

    control_text: literals that spell control tokens become them (X7a).   num_api_spec_tokens: SGLang's; nothing to do where a state is tokens.
    """
    if fn is not None:
        return Program(fn)
    return lambda fn: Program(fn, control_text=control_text, num_api_spec_tokens=num_api_spec_tokens)
