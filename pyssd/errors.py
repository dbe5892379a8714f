"""Exceptions of pyssd. Each message is one sentence: what happened, the offending value, what to do."""

from __future__ import annotations


class PyssdError(Exception):
    """Base of every exception that pyssd raises on purpose."""


class LibraryNotFoundError(PyssdError, ImportError):
    """The patched libllama, a ggml library or llama_cpp is missing or cannot be loaded."""


class LibraryConflictError(PyssdError, ImportError):
    """llama_cpp is loaded already with another library, or version or layout differ."""


class UnsupportedModelError(PyssdError, ValueError):
    """The model cannot do what was asked: recurrent memory, encoder, unknown structure."""


class ModelFileError(PyssdError, ValueError):
    """The model file is missing, damaged, or no GGUF file."""


class OptionError(PyssdError, ValueError):
    """An argument has a value that this version cannot honour."""


class SkipSetError(PyssdError, ValueError):
    """A skip set names blocks that the model lacks, or blocks that cannot be skipped."""


class ProfileError(PyssdError, ValueError):
    """A profile has a bad checksum, shape or version, or belongs to another model."""


class ContextOverflowError(PyssdError, ValueError):
    """The tokens do not fit into the context."""


class DecodeError(PyssdError, RuntimeError):
    """A pass over the model failed.

    Attributes:
        code: return value of llama_decode; 0 where no decode was involved.
    """

    def __init__(self, message: str = "", code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class BusyError(PyssdError, RuntimeError):
    """Another thread is using the object."""


class ClosedError(PyssdError, RuntimeError):
    """The object has been closed."""


class Cancelled(PyssdError):
    """A running call was cancelled; the engine turns this into finish_reason "cancelled"."""
