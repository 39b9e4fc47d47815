"""Kernel launches, and recorded calls that replay them without the host work before each."""

from .kernels import launch
from .recording import (
    Recording,
    call_key,
    empty,
    find_recording,
    may_replay,
    note_persistent_buffer,
    record,
    recorder,
    refuse,
    run_and_record,
    run_recorded,
)

__all__ = [
    "Recording",
    "call_key",
    "empty",
    "find_recording",
    "launch",
    "may_replay",
    "note_persistent_buffer",
    "record",
    "recorder",
    "refuse",
    "run_and_record",
    "run_recorded",
]
