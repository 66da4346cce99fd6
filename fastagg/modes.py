# SPDX-License-Identifier: Apache-2.0
"""Run code independently of torch's modes, which the caller may have set for other purposes."""

from __future__ import annotations

from abc import ABCMeta
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from fastagg.ops.memory import tensor_of

_set_gradients = torch._C._set_grad_enabled
_count_function_modes = torch._C._len_torch_function_stack
_SMALLEST = 5e-324  # a denormal float64
_NOTHING: AbstractContextManager[object] = nullcontext()


def plain_modes() -> AbstractContextManager[object]:
    """Return a context without inference mode, default device and flushing of denormals.

    These modes belong to the thread, so other threads are not affected. The default dtype belongs
    to the process; code that runs within this context therefore states the dtype of every tensor
    that it makes. In the usual case, with no mode set, this takes a fraction of a microsecond.
    """
    flushing = _SMALLEST * 1.0 == 0.0
    # `torch.set_default_device` and `with torch.device(...)` both push a function mode.
    devices = _count_function_modes() > 0
    if not (flushing or devices or torch.is_inference_mode_enabled()):
        return _NOTHING
    stack = ExitStack()
    try:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if devices:
            stack.enter_context(torch.device("cpu"))
        if flushing:
            stack.callback(torch.set_flush_denormal, True)
            torch.set_flush_denormal(False)
    except BaseException:  # raised by a signal handler: the caller's modes are still its own
        stack.close()
        raise
    return stack


class NoGradients:
    """``torch.no_grad()`` in a third of its time. A new object is entered once."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        _set_gradients(False)

    def __exit__(self, *_: object) -> None:
        _set_gradients(self._before)


def writable(tensor: Tensor) -> Tensor:
    """Return a tensor that can be changed in place outside of inference mode, with the same memory.

    A tensor that was made in inference mode can only be changed there, so it gets an alias.
    """
    if not tensor.is_inference() or tensor.is_neg():  # NumPy has no lazy negation; ops refuse it
        return tensor
    if tensor.device.type == "cpu":
        return tensor_of(tensor.numpy())
    return torch.from_dlpack(tensor)


class MadeInPlainModes(ABCMeta):
    """Metaclass of classes whose constructors run in :func:`plain_modes`.

    An object that was made in inference mode could otherwise not be changed outside of it.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        with plain_modes():
            return super().__call__(*args, **options)
