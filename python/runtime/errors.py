"""Every error that Phloem raises on purpose. Each says what was wrong, what was expected, and what to do.

    PhloemError                    500
    ├── RequestError               400   the request cannot be served as it stands
    │   ├── InvalidRequestError    400     a field is out of range, of the wrong type, or unknown (also a ValueError)
    │   ├── ContextLengthError     400     the prompt, or the tokens asked for, do not fit the model's context
    │   ├── CapacityError          400     they fit the context, but never this engine's KV pool
    │   └── GrammarError           400     the constraint cannot be compiled or is not enforceable
    │       └── GrammarDeadEnd     500     no legal token is left: a bug of ours, never an illegal token
    ├── ModelLoadError             500   a checkpoint, config or tokenizer cannot be used; lists every offender
    │   └── UnsupportedModelError  500     it is sound, but Phloem has no code for it
    ├── ConfigError                500   an engine option is unknown, or out of range (also a ValueError)
    ├── EngineBusyError            409   the call needs an idle engine
    ├── EngineClosedError          503   the engine was closed, or belongs to another process
    ├── EngineDeadError            503   the engine process or its device is gone
    ├── EngineSuspendedError       503   the KV pool was handed back; resume first
    ├── RequestTimeoutError        408   the caller's own deadline passed; the request was aborted
    ├── NumericalError             500   the model gave a logits row that is not finite
    ├── WeightsError               500   the weights cannot be changed or served like this
    │   ├── WeightLayoutError      400     tensors do not fit the model, or cannot be shared with it; lists every offender
    │   ├── StaleVersionError      409     a version of the weights that is not newer
    │   ├── UncommittedWeightsError 409    shared weights have changed and nobody committed them
    │   ├── WeightsInvalidError    503     an update in place is not complete
    │   └── MismatchError          500     the trainer's own forward disagrees with the engine's
    ├── KernelError                500   a native kernel refused its arguments
    └── ProgramError               400   a program of the language cannot go on; knows the line of the gen
        ├── IncompleteOutput       500     the output ended before it was a value of its type
        ├── CheckFailed            500     no output passed the gen's check
        ├── ToolFailed             500     a tool raised, was refused its arguments, or took too long
        ├── BackendUnsupported     400     the backend lacks what this node needs
        ├── BackendUnavailable     503     there is no backend, or it does not answer
        ├── ProgramTimeout         408     a deadline of the program passed; what ran was aborted (also a TimeoutError)
        ├── LimitExceeded          400     a limit of `limits(...)` was reached
        ├── Cancelled              499     the run was closed, or its block was left
        └── ReplayMismatch         500     a request differs from the recorded one

A `RequestError` concerns one request and leaves its neighbours alone. Assertions are for our own invariants.
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailable",
    "BackendUnsupported",
    "Cancelled",
    "CapacityError",
    "CheckFailed",
    "ConfigError",
    "ContextLengthError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineDeadError",
    "EngineSuspendedError",
    "GrammarDeadEnd",
    "GrammarError",
    "IncompleteOutput",
    "InvalidRequestError",
    "KernelError",
    "LimitExceeded",
    "MismatchError",
    "ModelLoadError",
    "NumericalError",
    "PhloemError",
    "ProgramError",
    "ProgramTimeout",
    "ReplayMismatch",
    "RequestError",
    "RequestTimeoutError",
    "StaleVersionError",
    "ToolFailed",
    "UncommittedWeightsError",
    "UnsupportedModelError",
    "WeightLayoutError",
    "WeightsError",
    "WeightsInvalidError",
    "from_wire",
]


class PhloemError(Exception):
    """Root of the tree. `status` is the HTTP status, `code` the word on the wire, `param` the field to blame.

    at, name, branch, prompt_tail, request_id: where in a program of the language it arose ("file.py:31", the gen's name, the branch
    indices, the end of what stood before it, the request); None outside of one.
    """

    status: int = 500
    code: str = "internal_error"
    at: str | None = None
    name: str | None = None
    branch: tuple[int, ...] | None = None
    prompt_tail: str | None = None
    request_id: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return (from_wire, (type(self).__name__, self.message, self.param, self.code))


class RequestError(PhloemError):
    status, code = 400, "invalid_request"


class InvalidRequestError(RequestError, ValueError):
    status, code = 400, "invalid_value"


class ContextLengthError(RequestError):
    status, code = 400, "context_length_exceeded"


class CapacityError(RequestError):
    status, code = 400, "capacity_exceeded"


class GrammarError(RequestError):
    status, code = 400, "invalid_grammar"


class GrammarDeadEnd(GrammarError):
    status, code = 500, "grammar_dead_end"


class ModelLoadError(PhloemError):
    status, code = 500, "model_load_failed"


class UnsupportedModelError(ModelLoadError):
    status, code = 500, "unsupported_model"


class ConfigError(PhloemError, ValueError):
    status, code = 500, "invalid_config"


class EngineBusyError(PhloemError):
    status, code = 409, "engine_busy"


class EngineClosedError(PhloemError):
    status, code = 503, "engine_closed"


class EngineDeadError(PhloemError):
    status, code = 503, "engine_dead"


class EngineSuspendedError(PhloemError):
    status, code = 503, "sleeping"


class RequestTimeoutError(PhloemError, TimeoutError):
    status, code = 408, "timeout"


class NumericalError(PhloemError):
    status, code = 500, "non_finite_logits"


class WeightsError(PhloemError):
    status, code = 500, "weights_error"


class WeightLayoutError(WeightsError):
    status, code = 400, "weight_layout"


class StaleVersionError(WeightsError):
    status, code = 409, "stale_version"


class UncommittedWeightsError(WeightsError):
    status, code = 409, "uncommitted_weights"


class WeightsInvalidError(WeightsError):
    status, code = 503, "weights_invalid"


class MismatchError(WeightsError):
    status, code = 500, "mismatch"


class KernelError(PhloemError):
    status, code = 500, "kernel_error"


class ProgramError(PhloemError):
    status, code = 400, "program_error"


class IncompleteOutput(ProgramError):
    status, code = 500, "incomplete_output"


class CheckFailed(ProgramError):
    status, code = 500, "check_failed"


class ToolFailed(ProgramError):
    status, code = 500, "tool_failed"


class BackendUnsupported(ProgramError):
    status, code = 400, "backend_unsupported"


class BackendUnavailable(ProgramError):
    status, code = 503, "backend_unavailable"


class ProgramTimeout(ProgramError, TimeoutError):
    status, code = 408, "program_timeout"


class LimitExceeded(ProgramError):
    status, code = 400, "limit_exceeded"


class Cancelled(ProgramError):
    status, code = 499, "cancelled"


class ReplayMismatch(ProgramError):
    status, code = 500, "replay_mismatch"


def from_wire(name: str, message: str, param: str | None = None, code: str | None = None) -> PhloemError:
    """The error that crossed a process border as plain strings. An unknown name becomes a `PhloemError`."""
    kind = globals().get(name)
    if not (isinstance(kind, type) and issubclass(kind, PhloemError)):
        kind = PhloemError
    return kind(message, param=param, code=code)
