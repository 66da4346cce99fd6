# SPDX-License-Identifier: Apache-2.0
"""Load a saved rule, perhaps with other options."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from fastagg import checkpoint
from fastagg.aggregator import Aggregator
from fastagg.checkpoint import CheckpointError
from fastagg.clipping import clip_bytes, read_clip_norm
from fastagg.costs import Cost, Sizes
from fastagg.modes import plain_modes, writable
from fastagg.norm_bound import norm_bytes, resolve_max_norm
from fastagg.ops.memory import memory_errors
from fastagg.options import option_names, read_factor, read_size
from fastagg.registry import available, find
from fastagg.server_optimizer import optimizer_cost, read_server_optimizer
from fastagg.updates.cohort import check_vector

_BOUNDS = ("max_norm", "clip_norm", "noise_multiplier")
"""Options that :func:`load` assigns after it has read the state, as a caller may."""
_PLACES = ("memory_folder", "device")
"""Options that say where the state is, which may not fit elsewhere."""


class Bounded(Protocol):
    """What :func:`set_bounds` asks of an aggregator, which has all of ``_BOUNDS``."""

    @property
    def noise_multiplier(self) -> float: ...


def load(
    path: str | os.PathLike[str],
    *,
    params: Tensor | None = None,
    key: bytes | None = None,
    **options: Any,
) -> Aggregator:
    """Recreate an aggregator from a file that ``Aggregator.save`` wrote.

    Its further steps give the same bits as those of the saved aggregator.

    The file need not be trusted. Sizes, names, shapes and dtypes are compared with those of the
    rule before its state is allocated; then the file is read once, the digest of all its bytes is
    verified, and so is what the rule declares of its state. The file is not mapped, nothing is
    unpickled, and ``memory_folder`` never comes from it. A file without a digest, from before
    format version 3, is loaded with a warning.

    Args:
        path: the file.
        params: [d] float32 on the aggregator's device, overwritten with the parameters that
            ``Aggregator.save`` wrote into the file; None: they are not wanted.
        key: the key that was given to ``Aggregator.save``. A file that is not signed is then
            refused.
        **options: options to change, for example ``memory_folder``, ``nonfinite`` or ``device``.
            On another device the state is the same, but further steps may differ in the last bits.
            ``max_norm``, ``clip_norm`` and ``noise_multiplier`` are set after the state was read,
            as if you assigned the attributes: an adaptive bound begins anew, unless it is equal.
            ``nonfinite="drop"`` makes ``max_norm`` adaptive if the file has "raise" and no limit,
            as by default; pass ``max_norm=None`` for none. With another ``rule`` inside a wrapper,
            ``rule_options`` of the file do not count.
            Options on which the state depends cannot change: ``client_weights`` of rules with a
            total, ``similarity`` of ``fdms``, ``seed`` of ``fdms-means``, and all that change its
            size, such as ``num_clients``, ``memory_dtype``, ``max_age``, ``staleness``, ``sketch``
            or ``reuse``. For ``num_clients`` and ``client_weights``, see ``Aggregator.grow``.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: a ValueError. The file is truncated, damaged or changed, is not a
            checkpoint of this library, has another format version, is not signed with ``key``, or
            holds no possible state of its rule.
        ValueError: the value of an argument is invalid, or the file is right, but not with these
            ``options``. To tell which it is, the file is read again without them.
        TypeError: the rule has no such option, or an argument has a wrong type.

    After an exception ``params`` have not changed.
    """
    with plain_modes():
        try:
            with checkpoint.opened(path, key=key) as saved:
                return _load(saved, params, options)
        except CheckpointError as error:
            found = error
        kept = {name: options[name] for name in _PLACES if name in options}
        changed = sorted(options.keys() - kept.keys())
        if changed:
            for failed in (found, found.__cause__):  # frees the state that was read
                if failed is not None:
                    traceback.clear_frames(failed.__traceback__)
            if _loads(path, key, params, kept):
                raise _fault_of(changed, path, found.__cause__ or found) from found
        raise found


def _load(saved: checkpoint.Saved, params: Tensor | None, options: Mapping[str, Any]) -> Aggregator:
    """Load an open file; other arguments and errors as for :func:`load`.

    Raises:
        CheckpointError: as there, or the file does not fit ``options``.
    """
    aggregator = _make_saved(saved, options)
    if params is not None:
        check_vector("params", params, aggregator.num_params, aggregator.device)
    bounds = changed_bounds(saved.options, options)
    # A bound may be refused after the parameters were read.
    vector = torch.empty_like(params) if params is not None and bounds else params
    try:
        aggregator.load_saved(saved, vector)
    except CheckpointError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointError(saved.path, error) from error
    try:
        set_bounds(aggregator, bounds)
    except (TypeError, ValueError) as error:
        if _names_one_of(options, error):
            raise
        raise _fault_of(sorted(bounds), saved.path, error) from error
    if params is not None and vector is not None and vector is not params:
        with torch.no_grad():  # they may be a Parameter
            writable(params).copy_(vector)
    return aggregator


def _loads(
    path: str | os.PathLike[str],
    key: bytes | None,
    params: Tensor | None,
    options: Mapping[str, Any],
) -> bool:
    """Return whether a file is right with these options; arguments as for :func:`load`."""
    try:
        with checkpoint.opened(path, key=key) as saved:
            aggregator = _make_saved(saved, options)
            vector = None  # where parameters of the file go that the caller wants
            if params is not None:
                size, device = aggregator.num_params, aggregator.device
                vector = torch.empty(size, dtype=torch.float32, device=device)
            aggregator.load_saved(saved, vector)
    except Exception:
        return False
    return True


def _fault_of(names: list[str], path: str | os.PathLike[str], error: BaseException) -> Exception:
    """Return the error for options with which a file that is right cannot be loaded.

    Args:
        names: of the caller's options.
        path: the file.
        error: what went wrong.
    """
    problem = error.args[-1] if isinstance(error, CheckpointError) else error
    these, them = ("this option", "it") if len(names) == 1 else ("these options", "them")
    text = f"{', '.join(names)}: {path} loads without {these}, but not with {them}: {problem}"
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def _make_saved(saved: checkpoint.Saved, options: Mapping[str, Any]) -> Aggregator:
    """Make the aggregator of a file, after its sizes were compared with the file's state.

    Raises:
        CheckpointError: the rule or an option in the file is not as expected.
        TypeError, ValueError: one of ``options`` is not as expected.
    """
    state_bytes = sum(entry.nbytes for entry in saved.entries.values())
    rule = check_saved(saved.path, saved.rule, saved.options, options, state_bytes)
    size = options.get("num_params", saved.options.get("num_params"))
    if saved.params is not None and saved.params.shape != (size,):
        raise CheckpointError(
            saved.path, f"params: expected shape [{size}], got {[*saved.params.shape]}"
        )
    try:
        with memory_errors():
            aggregator = rule(**merged_options(saved.options, options))
        check_state_options(aggregator, saved.options, options)
        return aggregator
    except (MemoryError, OSError):
        raise
    except Exception as error:
        raise_for(saved.path, error, options)


def check_saved(
    path: str | os.PathLike[str],
    name: str,
    saved: Mapping[str, Any],
    options: Mapping[str, Any],
    state_bytes: int,
    *,
    ranks: int = 1,
) -> type[Aggregator]:
    """Check rule and options of a checkpoint, and its sizes. Allocates nothing of these sizes.

    Args:
        path: of the checkpoint, for messages.
        name: the rule in the file.
        saved: the options in the file.
        options: those that the caller changes.
        state_bytes: size of the state in the file.
        ranks: number of processes, perhaps on as many machines, that share columns and memory.

    Returns:
        The class of the rule.

    Raises:
        CheckpointError: the file has an unknown rule or option, ``memory_folder``, or a state of
            another size than the rule has with these options.
        TypeError, ValueError: one of ``options`` is not as expected.
    """
    if name not in available():
        raise CheckpointError(path, f"rule: expected one of {available()}, got {name[:200]!r}")
    rule = find(name, list(options))
    known = set(option_names(rule)) - rule.not_saved
    unknown = sorted(set(saved) - known)
    if unknown:
        raise CheckpointError(
            path, f"options: expected some of {sorted(known)} for rule {name!r}, got {unknown}"
        )
    if "client_weights" in known and not isinstance(saved.get("client_weights"), Tensor):
        raise CheckpointError(path, "options: expected a tensor as client_weights")
    try:  # these are the file's, also where the caller gives others
        read_clip_norm(saved.get("clip_norm"))
        read_server_optimizer(saved.get("server_optimizer", "sgd"))
        read_factor("noise_multiplier", saved.get("noise_multiplier", 0.0))
    except Exception as error:
        raise CheckpointError(path, f"options: {error}") from error
    merged = merged_options(saved, options)
    try:
        cost = _saved_cost(rule, merged)
        chosen = [given.get("server_optimizer", "sgd") for given in (saved, merged)]
        optimizers = [read_server_optimizer(value).name for value in chosen]
    except Exception as error:
        raise_for(path, error, options)
    if optimizers[0] != optimizers[1]:
        raise ValueError(
            f"server_optimizer: expected {optimizers[0]!r}, as in the file, because the moments of "
            f"one optimizer are not those of another, got {optimizers[1]!r}"
        )
    num_params = merged["num_params"]
    changing = _changing_the_state(rule, saved, options, state_bytes)
    if changing:
        raise _state_depends(changing, name)
    if state_bytes != cost.state:
        raise CheckpointError(
            path,
            f"state: expected {cost.state} bytes for rule {name!r} with num_clients = "
            f"{merged['num_clients']} and num_params = {num_params}, got {state_bytes}",
        )
    memory = ranks * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    kept = cost.state + cost.references
    needed = cost.scratch + (kept if options.get("memory_folder") is None else 0)
    if needed > memory:  # the state of some rules, which was compared, does not depend on d
        raise CheckpointError(
            path,
            f"num_params: expected a rule that fits into {memory} bytes of memory, got "
            f"{num_params}, for which {name!r} needs {needed}",
        )
    return rule


def merged_options(saved: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with which a rule is made before its state is read.

    Args:
        saved: those of the file.
        options: those of the caller, which replace them, but for ``_BOUNDS``.
    """
    merged = {"max_norm": None, **saved}  # files from before this option have none
    merged |= {name: value for name, value in options.items() if name not in _BOUNDS}
    if "rule_options" not in options and merged.get("rule") != saved.get("rule"):
        merged.pop("rule_options", None)  # they are those of another rule
    return merged


def changed_bounds(saved: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``_BOUNDS`` that change after the state of a file was read.

    Args:
        saved: the options of the file.
        options: those of the caller.
    """
    bounds = {name: options[name] for name in _BOUNDS if name in options}
    nonfinite = options.get("nonfinite", saved.get("nonfinite"))
    without = saved.get("max_norm") is None and saved.get("nonfinite") == "raise"
    if without and nonfinite != "raise":  # the default of the file's nonfinite
        bounds.setdefault("max_norm", "auto")
    if "max_norm" in bounds:
        noise = bounds.get("noise_multiplier", saved.get("noise_multiplier", 0.0))
        bounds["max_norm"] = resolve_max_norm(bounds["max_norm"], nonfinite, noise)
    return bounds


def set_bounds(aggregator: Bounded, bounds: Mapping[str, Any]) -> None:
    """Assign the options of :func:`changed_bounds`, in an order in which each fits the others.

    Raises:
        TypeError, ValueError: an option is not as expected, or does not fit the state.
    """
    names = [name for name in _BOUNDS if name in bounds]
    if "noise_multiplier" in bounds:
        noise = read_factor("noise_multiplier", bounds["noise_multiplier"])
        if noise < aggregator.noise_multiplier:  # the other ones may need less noise
            names.reverse()
    for name in names:
        setattr(aggregator, name, bounds[name])


def _saved_cost(rule: type[Aggregator], options: Mapping[str, Any]) -> Cost:
    """Return the cost of a rule with one active client, with the bytes of its whole state.

    Raises:
        Exception: an option is not as expected.
    """
    own = {**options}
    num_clients = read_size("num_clients", own.pop("num_clients", None))
    num_params = read_size("num_params", own.pop("num_params", None))
    cost = rule.cost(Sizes(num_clients, 1, num_params, owned=False), own)
    more = norm_bytes(own.get("max_norm")) + clip_bytes(own.get("clip_norm"))
    more += optimizer_cost(own.get("server_optimizer", "sgd"), num_params).state
    return replace(cost, state=cost.state + more)


def _changing_the_state(
    rule: type[Aggregator], saved: Mapping[str, Any], options: Mapping[str, Any], state_bytes: int
) -> list[str]:
    """Return which of the caller's options do not fit the sizes of a file, sorted.

    There are none if the sizes do not fit without the options, either.

    Args:
        rule: the rule in the file.
        saved, options, state_bytes: as for :func:`check_saved`.
    """

    def fits(changed: Mapping[str, Any]) -> bool:
        try:
            merged = merged_options(saved, changed)
            kept = [value for name, value in saved.items() if name not in changed]
            each = [len(value) for value in kept if isinstance(value, Tensor)]  # one per client
            return (
                all(count == merged["num_clients"] for count in each)
                and _saved_cost(rule, merged).state == state_bytes
            )
        except Exception:  # one option may need another
            return False

    if not options or fits(options) or not fits({}):
        return []
    return [name for name in sorted(options) if not fits({name: options[name]})] or sorted(options)


def _state_depends(names: list[str], rule: str) -> ValueError:
    """Return the error for options on which the state in a file depends."""
    expected, these = ("that", "this option") if len(names) == 1 else ("those", "these options")
    more = ", then call grow for more clients" if "num_clients" in names else ""
    return ValueError(
        f"{', '.join(names)}: expected {expected} of the checkpoint, on which the state of "
        f"{rule!r} depends; load it without {these}{more}"
    )


def check_state_options(
    aggregator: Aggregator, saved: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Raise ValueError if an option is changed on which the state of a checkpoint depends.

    Args:
        aggregator: made with these options.
        saved: the options in the checkpoint.
        options: those that the caller changes.
    """
    for name in sorted(aggregator.state_options & options.keys() & saved.keys()):
        before, now = saved[name], getattr(aggregator, name)
        same = torch.equal(before, now) if isinstance(before, Tensor) else before == now
        if not same:
            raise _state_depends([name], aggregator.name)


def raise_for(
    path: str | os.PathLike[str], error: Exception, options: Mapping[str, Any]
) -> NoReturn:
    """Raise the error of a constructor: as it is if it names one of the caller's ``options``."""
    if _names_one_of(options, error):
        raise error
    raise CheckpointError(path, f"options: {error}") from error


def _names_one_of(options: Mapping[str, Any], error: Exception) -> bool:
    """Return whether an error is about one of the options, by the beginning of its message."""
    return bool(options.keys() & set(str(error).partition(":")[0].split(", ")))
