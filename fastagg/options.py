# SPDX-License-Identifier: Apache-2.0
"""Validation of options. Each error names the option, what was expected and what was given."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fastagg.ops import devices

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

FLOAT32_LIMIT = 3.4e38
"""Upper limit of magnitudes: the float32 maximum, less 0.08 % as a margin for rounding."""

LARGEST_ROW = 1e30
"""Largest magnitude or norm of a row with ``nonfinite="drop"``, for server_lr <= 1. Sums of such
rows over 10^8 rounds stay in the range of float32."""

MOST = (1 << 62) - 1
"""Largest count; sums and products by 2 fit into an int64."""

_SHOWN = 100  # characters of a value in a message
_FEW = 10  # names in a message

MOST_ITERATIONS = 100_000
"""Largest number of iterations of a rule in a step, which cannot be interrupted."""


def read_factor(name: str, value: object) -> float:
    """Return ``value`` as a float; it must be a factor in [0, FLOAT32_LIMIT]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {shown(value)} ({type(value).__name__})")
    number = as_float(value)
    if not 0.0 <= number <= FLOAT32_LIMIT:
        raise ValueError(f"{name}: expected a finite number >= 0, got {number}")
    return number


def as_float(value: Any) -> float:
    """Return a number as a float, infinite if it is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shown(value: object) -> str:
    """Return a value from anybody as a short text for a message. Cannot fail."""
    try:
        text = repr(value)
    except Exception:  # integers of thousands of digits, deeply nested lists, other code
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


def few(names: list[str]) -> list[str]:
    """Return the first of some names from anybody, each cut, for a message."""
    return [name[:_SHOWN] for name in names[:_FEW]] + (["..."] if len(names) > _FEW else [])


def read_count(name: str, value: object, *, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int; it must be in [``least``, ``most``]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: expected an int, got {shown(value)} ({type(value).__name__})")
    number = int(value)
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {shown(value)}")
    if most is not None and number > most:
        raise ValueError(f"{name}: expected at most {most}, got {shown(value)}")
    return number


def read_size(name: str, value: object) -> int:
    """Return ``value`` as an int; it must be at least 1."""
    return read_count(name, value, least=1, most=MOST)


def read_positive(name: str, value: object, *, infinite: bool = False) -> float:
    """Return ``value`` as a float; it must be > 0, and finite unless ``infinite`` is True."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {shown(value)} ({type(value).__name__})")
    number = as_float(value)
    if not 0.0 < number <= (math.inf if infinite else math.nextafter(math.inf, 0.0)):
        kind = "number" if infinite else "finite number"
        raise ValueError(f"{name}: expected a {kind} > 0, got {number}")
    return number


def read_part(name: str, value: object) -> float:
    """Return ``value`` as a float; it must be in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {shown(value)} ({type(value).__name__})")
    number = as_float(value)
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"{name}: expected a number in [0, 1], got {number}")
    return number


def read_choice(name: str, value: object, choices: list[str]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {shown(value)}")
    return value


def read_mapping(name: str, value: object) -> dict[str, Any]:
    """Return a mapping with string keys as a new dict; None gives an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise TypeError(
            f"{name}: expected a mapping from option names to values, got {shown(value)}"
        )
    return dict(value)


def read_device_name(value: str | torch.device) -> torch.device:
    """Return ``value`` as a device that torch knows, also if this build has no kernels for it."""
    try:
        return torch.device(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ValueError: an int beyond int64
        raise ValueError(f"device: expected {_expected_devices()}, got {value!r}") from error


def read_device(value: str | torch.device) -> torch.device:
    """Return ``value`` as a device for which this build has kernels.

    A GPU gets an index, the current device's if none was given, because tensors on it have one.
    """
    device = read_device_name(value)
    if device.type not in devices():
        raise ValueError(
            f"device: expected {_expected_devices()}, got {str(value)!r}{_missing(device)}"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.device("cuda", index)


def _expected_devices() -> str:
    return " or ".join(map(repr, devices()))


def _missing(device: torch.device) -> str:
    """Return why a device cannot be used, for a message: the build, torch or the machine."""
    if device.type != "cuda":
        return " (the devices that this build has kernels for)"
    if not torch.version.cuda:
        return "; this torch was built without CUDA: install one with CUDA and build fastagg again"
    if not torch.cuda.is_available():
        return "; torch finds no GPU on this machine (see nvidia-smi)"
    return "; fastagg was built without CUDA kernels: build it again with FASTAGG_CUDA=1"


def option_names(rule: type) -> list[str]:
    """Return the keyword-only arguments of a class's constructors, those of base classes first."""
    return list(option_defaults(rule))


@functools.cache
def option_defaults(rule: type) -> Mapping[str, Any]:
    """Return the options of a class with their defaults; ``inspect.Parameter.empty``: none."""
    constructors = (vars(cls).get("__init__") for cls in reversed(rule.__mro__))
    signatures = [inspect.signature(c) for c in constructors if inspect.isfunction(c)]
    parameters = [p for signature in signatures for p in signature.parameters.values()]
    return MappingProxyType({p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY})


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names up to three similar names; empty if there are none."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def replace_fields(frozen: object, **values: object) -> None:
    """Give fields of a frozen dataclass the values that were read from them.

    For ``__post_init__``: checkpoints hold plain numbers, and not those of NumPy.
    """
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def to_saved(name: str, value: Any) -> Any:
    """Return an option as checkpoints hold it: a tensor, or a value that JSON holds exactly.

    Raises:
        ValueError: it is a function.
    """
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    ours = type(value).__module__.startswith("fastagg.")
    if ours and dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__} | dataclasses.asdict(value)
    if callable(value):
        raise ValueError(
            f"{name}: a custom callable cannot be written to a checkpoint, got {value!r}; use a "
            "name or an object of this library, or keep state_dict() and make the rule again"
        )
    return value


def from_saved(name: str, value: Mapping[str, Any], kind: type[T]) -> T:
    """Return the object of a mapping from :func:`to_saved`, or of a user's mapping.

    Args:
        name: of the option.
        value: arguments of ``kind``, and perhaps its name as "kind".
        kind: a dataclass.

    Raises:
        TypeError, ValueError: ``value`` is not that.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    given = {key: part for key, part in value.items() if key != "kind"}
    if value.get("kind", kind.__name__) != kind.__name__ or given.keys() - set(names):
        raise ValueError(f"{name}: expected some of {names}, got {dict(value)!r}")
    return kind(**given)
