"""What can go wrong, as one tree.

ForedraftError                 exit code 1, one line: the cause and the cure
├── ParameterError             a value that no request or command may have (exit code 2); names the field
├── PromptTooLongError         prompt (+ max_tokens) does not fit the context
├── ModelFileError             missing, truncated, hostile or foreign file
├── UnsupportedModelError      a sound file that this build cannot run: architecture, quantisation, tokenizer
├── TokenizerMismatchError     draft and target do not speak the same tokens
├── ChatTemplateError          no template, or the template refused the messages
├── DownloadError              network, hash, disk
├── NumericalError             the model produced NaN
│   └── NoTokenError           every token is excluded
│       └── GrammarError       the request's grammar cannot go on: too large for its limits, or beyond the vocabulary
├── QueueFullError             too many requests wait already: try again later
├── EngineUnavailableError     the engine does not take requests: it loads, drains, or has stopped
├── EngineFailedError          the engine broke down; every request of it fails
├── NativeCoreError            the C++ core is missing or cannot run here
└── MissingExtraError          an optional part of the package is not installed
"""


class ForedraftError(Exception):
    """Base of all errors that foredraft raises on purpose. `str(error)` is one line for the user."""

    exit_code = 1


class ParameterError(ForedraftError, ValueError):
    """An impossible value. `field` is the name the user wrote."""

    exit_code = 2

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field


class PromptTooLongError(ForedraftError, ValueError):
    """`field` is the name the user wrote."""

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


class ModelFileError(ForedraftError): ...


class UnsupportedModelError(ForedraftError): ...


class TokenizerMismatchError(ForedraftError): ...


class ChatTemplateError(ForedraftError): ...


class DownloadError(ForedraftError): ...


class NumericalError(ForedraftError): ...


class NoTokenError(NumericalError): ...


class GrammarError(NoTokenError): ...


class QueueFullError(ForedraftError): ...


class EngineUnavailableError(ForedraftError): ...


class EngineFailedError(ForedraftError): ...


class NativeCoreError(ForedraftError): ...


class MissingExtraError(ForedraftError, ImportError): ...
