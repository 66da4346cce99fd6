# SPDX-License-Identifier: Apache-2.0
"""The file format of an aggregator: a safetensors file, with everything else as JSON in its header.

Nothing is pickled. A file is replaced atomically: the new content is written beside it, synced and
renamed, so a crash at any moment leaves either the old file or the new one.

The header holds a SHA-256 of the whole file, or an HMAC-SHA256 if a key was given. It is the digest
of the bytes of the file, with zeros in place of the 64 hexadecimal digits of the digest itself. A
reader computes it from the same bytes that it takes as tensors, in one pass.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastagg import tensor_file
from fastagg.checkpoint.atomic import replace
from fastagg.modes import plain_modes
from fastagg.options import shown
from fastagg.tensor_file import Entry, Header, RowsOf, TensorFileError

FORMAT = "fastagg.aggregator"
VERSION = 3
"""Version 3 added the digest and the parameters. Version 2, which has neither, is still read.
Version 1 was never released."""

HEADER_LIMIT = 1 << 20
"""Largest size of a header in bytes. A reader needs up to 30 times as much memory for its JSON."""

LISTS_LIMIT = 1 << 26
"""The same for files whose options hold lists of clients or of a model's tensors."""

_UNSIGNED = 2
_STATE = "state."
_OPTION = "option."
_PARAMS = "params"
_SHA, _HMAC = "sha256", "hmac-sha256"
_ZEROS = "0" * 64
_LEAST_KEY = 16  # bytes

Sink = Iterable[Tensor]
"""Where the numbers of a tensor go: contiguous tensors on the CPU that are filled in order. The
next one is requested when the last one is full, so all may be the same tensor."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be used.

    It is truncated, damaged or changed, was not written by fastagg, or its content is not the
    possible state of a rule. The message names the file and what is wrong in it.
    """

    def __init__(self, path: object, problem: object) -> None:
        super().__init__(str(path), str(problem))

    def __str__(self) -> str:
        return ": ".join(self.args)


def write(
    path: str | os.PathLike[str],
    rule: str,
    options: Mapping[str, Any],
    state: Mapping[str, Tensor | RowsOf],
    *,
    params: Tensor | None = None,
    key: bytes | None = None,
    keep: int = 1,
    limit: int = HEADER_LIMIT,
) -> None:
    """Write an aggregator to ``path``, replacing an older file atomically.

    Args:
        path: the file; its folder must exist.
        rule: registered name of the rule.
        options: arguments of the constructor: tensors, or values that JSON represents exactly.
        state: tensors of ``state_dict``. Those with two dimensions are written row by row, so that
            only one row is in memory at a time.
        params: [d], the parameters of the model; None: they are not in the file.
        key: secret of at least 16 bytes for an HMAC-SHA256; None: the file gets a SHA-256.
        keep: number of files to keep; see :func:`fastagg.checkpoint.atomic.replace`.
        limit: largest size of the header in bytes; a reader must accept as much.

    Raises:
        OSError: the folder does not exist or is not writable. An older file is unchanged.
        TypeError, ValueError: ``key`` or ``keep`` is not as described, or the header is too large.
    """
    digest = _digest(key)
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ValueError(f"keep: expected an int of at least 1, got {keep!r}")
    plain = {k: v for k, v in options.items() if not isinstance(v, Tensor)}
    tensors: dict[str, Tensor | RowsOf] = {_STATE + k: v for k, v in state.items()}
    tensors |= {_OPTION + k: v for k, v in options.items() if isinstance(v, Tensor)}
    if params is not None:
        tensors[_PARAMS] = params
    field = _SHA if key is None else _HMAC
    header = {  # the digest comes first, where no other text can look like it
        field: _ZEROS,
        "format": FORMAT,
        "version": str(VERSION),
        "rule": rule,
        "options": json.dumps(plain, allow_nan=False),
    }

    def fill(partial: Path) -> None:
        tensor_file.save(partial, tensors, header, limit=limit, note=digest.update)
        with partial.open("r+b") as file:
            start = file.read(1024).index(_ZEROS.encode())
            file.seek(start)
            file.write(digest.hexdigest().encode())

    replace(Path(path), fill, keep=keep)


def read(
    path: str | os.PathLike[str], *, key: bytes | None = None, limit: int = HEADER_LIMIT
) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """Read a file that :func:`write` wrote.

    Returns:
        rule, options, state: as they were passed to :func:`write`.

    Raises:
        FileNotFoundError, CheckpointError: as for :func:`opened`.
    """
    with plain_modes(), opened(path, key=key, limit=limit) as saved:
        state = {
            name: torch.empty(entry.shape, dtype=saved.dtype(name), device="cpu")
            for name, entry in saved.entries.items()
        }
        saved.read({name: [tensor] for name, tensor in state.items()})
        return saved.rule, saved.options, state


class Saved:
    """An open checkpoint. Its header has been checked, its digest not before :meth:`read`.

    Attributes:
        path: path of the file.
        rule, options: as they were passed to :func:`write`.
        entries: dtype, shape and size of the state's tensors, by name.
        params: dtype, shape and size of the parameters; None if they are not in the file.
    """

    def __init__(self, path: Path, descriptor: int, key: bytes | None, limit: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._identity = tensor_file.identity(descriptor)
        self._header = header = tensor_file.read_header(descriptor, limit)
        version = _check_header(path, header.metadata)
        self._expected, self._digest = _start(path, header, version, key)
        metadata = header.metadata
        if "rule" not in metadata or "options" not in metadata:
            raise CheckpointError(path, "damaged header: expected a rule and options")
        self.rule = metadata["rule"]
        try:
            self.options: dict[str, Any] = tensor_file.parse_json(metadata["options"])
        except TensorFileError as error:
            raise CheckpointError(path, f"damaged header: options: {error}") from error
        if not isinstance(self.options, dict):
            raise CheckpointError(path, f"options: expected an object, got {shown(self.options)}")
        self.entries: dict[str, Entry] = {}
        self.params = header.entries.get(_PARAMS)
        self._option_bytes: dict[str, Tensor] = {}
        for name, entry in header.entries.items():
            if name.startswith(_STATE):
                self.entries[name.removeprefix(_STATE)] = entry
            elif name.startswith(_OPTION):
                self._read_option(entry)
            elif name != _PARAMS:
                raise CheckpointError(path, f"damaged header: unknown tensor {shown(name)}")

    @property
    def names(self) -> list[str]:
        """Names of the state's tensors."""
        return [*self.entries]

    def check_params(self, num_params: int) -> None:
        """Raise ValueError if the file holds no parameters, or not ``num_params`` of them."""
        if self.params is None:
            raise ValueError("expected the parameters of a model in the file, got none")
        if self.params.shape != (num_params,) or self.params.kind != "F32":
            raise ValueError(
                f"params: expected F32 [{num_params}], got {self.params.kind} "
                f"{list(self.params.shape)}"
            )

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the state."""
        return self.entries[name].dtype

    def _read_option(self, entry: Entry) -> None:
        name, size = entry.name.removeprefix(_OPTION), self.options.get("num_clients")
        if name in self.options:
            raise CheckpointError(self.path, f"options: {name} is in the header and a tensor")
        if entry.shape != (size,) and size is not None:
            raise CheckpointError(
                self.path, f"options: {name}: expected shape [{size}], got {[*entry.shape]}"
            )
        value = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self._fill(entry, [value], note=None)
        self.options[name] = self._option_bytes[entry.name] = value

    def read(self, sinks: Mapping[str, Sink], params: Sink | None = None) -> None:
        """Read the whole file once, verify its digest, and put tensors where the caller wants them.

        Args:
            sinks: where tensors of the state go, by name; others are only verified. They have the
                dtypes of the file, and as many numbers. They hold rubbish if this raises.
            params: where the parameters go.

        Raises:
            CheckpointError: the file is truncated, damaged or changed.
            OSError: the file cannot be read.
        """
        wanted = {_STATE + name: sink for name, sink in sinks.items()}
        if params is not None:
            wanted[_PARAMS] = params
        try:
            for name, entry in self._header.entries.items():
                if name in wanted:
                    self._fill(entry, wanted[name], note=self._digest)
                elif name in self._option_bytes:
                    again = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                    self._fill(entry, [again], note=self._digest)
                    known = self._option_bytes[name]
                    if tensor_file.bytes_of(again) != tensor_file.bytes_of(known):
                        raise TensorFileError("the file changed while it was read")
                else:
                    tensor_file.pass_over(self._descriptor, entry, self._digest.update)
            if tensor_file.identity(self._descriptor) != self._identity:
                raise TensorFileError("the file changed while it was read")
        except TensorFileError as error:
            raise CheckpointError(self.path, error) from error
        if self._expected is not None and not hmac.compare_digest(
            self._digest.hexdigest(), self._expected
        ):
            kind = "checksum" if not isinstance(self._digest, hmac.HMAC) else "signature"
            raise CheckpointError(
                self.path,
                f"damaged or changed since it was written: its {kind} is wrong"
                + ("" if kind == "checksum" else ", or it was signed with another key"),
            )

    def read_columns(self, columns: Mapping[str, slice | None]) -> dict[str, Tensor]:
        """Read tensors of the state as :meth:`read` does; of some only a part of the columns.

        Args:
            columns: by name, part of the last dimension of a tensor [..., n]; None: all.

        Raises:
            CheckpointError, OSError: as for :meth:`read`, or a tensor has no dimensions.
        """
        found: dict[str, Tensor] = {}
        sinks: dict[str, Sink] = {}
        for name, part in columns.items():
            entry = self.entries[name]
            shape = [*entry.shape]
            if part is not None:
                if not shape:
                    raise CheckpointError(self.path, f"state: {name}: expected columns, got none")
                shape[-1] = len(range(*part.indices(shape[-1])))
            found[name] = torch.empty(shape, dtype=entry.dtype, device="cpu")
            sinks[name] = [found[name]] if part is None else _columns(found[name], entry, part)
        self.read(sinks)
        return found

    def _fill(self, entry: Entry, sink: Sink, note: Any) -> None:
        offset, end = entry.offset, entry.offset + entry.nbytes
        for part in sink:
            if part.dtype != entry.dtype or part.nbytes > end - offset:
                raise AssertionError(f"{entry.name}: the sink does not fit the tensor")
            tensor_file.read_into(self._descriptor, part, offset)
            offset += part.nbytes
            if note is not None:
                note.update(tensor_file.bytes_of(part))
            if part.dtype == torch.bool and part.numel() and part.view(torch.uint8).max() > 1:
                raise TensorFileError(f"{entry.name}: expected the bytes 0 and 1 as flags")
        if offset != end:
            raise AssertionError(f"{entry.name}: the sink does not fit the tensor")


def _columns(out: Tensor, entry: Entry, part: slice) -> Iterator[Tensor]:
    """Yield a scratch row for every row of ``out``, and copy its columns ``part`` there."""
    row = torch.empty(entry.shape[-1], dtype=entry.dtype, device="cpu")
    for target in out.view(-1, out.shape[-1]):
        yield row
        target.copy_(row[part])


@contextmanager
def opened(
    path: str | os.PathLike[str], *, key: bytes | None = None, limit: int = HEADER_LIMIT
) -> Iterator[Saved]:
    """Open a file that :func:`write` wrote.

    Args:
        path: the file.
        key: the key that was given to :func:`write`; None: the file must not be signed.
        limit: largest size of the header in bytes.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is truncated or damaged, was not written by fastagg, has another
            version of the format, or is signed and no key was given, or the other way round.
    """
    _digest(key)  # checks the key
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(f"path: there is no checkpoint {target}")
    with tensor_file.opened(target) as descriptor:
        try:
            saved = Saved(target, descriptor, key, limit)
        except CheckpointError:
            raise
        except TensorFileError as error:
            raise CheckpointError(
                target, f"not a checkpoint, or a truncated or damaged one: {error}"
            ) from error
        yield saved


def _check_header(path: Path, header: Mapping[str, str]) -> int:
    """Refuse a file of another kind or version; return its version."""
    if header.get("format") != FORMAT:
        raise CheckpointError(
            path,
            "a safetensors file but not a fastagg checkpoint: expected format "
            f"{FORMAT!r} in its header, got {str(header.get('format'))[:200]!r}",
        )
    version = header.get("version", "")
    if not re.fullmatch("[0-9]{1,9}", version):
        raise CheckpointError(path, f"damaged header: version {version[:200]!r}")
    if int(version) not in (VERSION, _UNSIGNED):
        age, advice = (
            ("a newer", "upgrade fastagg to read it")
            if int(version) > VERSION
            else ("an older", "read it with the fastagg that wrote it")
        )
        raise CheckpointError(
            path,
            f"written by {age} fastagg: it has format version {version}, this one reads versions "
            f"{_UNSIGNED} and {VERSION}; {advice}",
        )
    known = {"format", "version", "rule", "options", _SHA, _HMAC}
    if not header.keys() <= known:
        raise CheckpointError(
            path, f"damaged header: expected the fields {sorted(known)}, got {sorted(header)}"
        )
    return int(version)


def _start(
    path: Path, header: Header, version: int, key: bytes | None
) -> tuple[str | None, hashlib._Hash | hmac.HMAC]:
    """Return the digest that the header states, and one that has taken in the header."""
    metadata, digest = header.metadata, _digest(key)
    stated = metadata.get(_HMAC if key is not None else _SHA)
    if key is None and _HMAC in metadata:
        raise CheckpointError(path, "signed with a key: pass it as key=")
    if key is not None and _HMAC not in metadata:
        raise CheckpointError(
            path, "expected a file that is signed with a key, got one that is not"
        )
    if stated is None:
        if version != _UNSIGNED:
            raise CheckpointError(path, "damaged header: expected a checksum")
        warnings.warn(
            f"{path} was written by an older fastagg and has no checksum: damage to its numbers "
            "may go unnoticed; save it again",
            stacklevel=6,
        )
        return None, digest
    if not re.fullmatch("[0-9a-f]{64}", stated) or header.raw.count(stated.encode()) != 1:
        raise CheckpointError(path, "damaged header: expected one checksum of 64 digits")
    digest.update(header.raw.replace(stated.encode(), _ZEROS.encode()))
    return stated, digest


def _digest(key: bytes | None) -> hashlib._Hash | hmac.HMAC:
    """Return an empty SHA-256, or HMAC-SHA256.

    Raises:
        TypeError, ValueError: the key is not as described.
    """
    if key is None:
        return hashlib.sha256()
    if not isinstance(key, bytes | bytearray):
        raise TypeError(f"key: expected bytes or None, got {type(key).__name__}")
    if len(key) < _LEAST_KEY:
        raise ValueError(f"key: expected at least {_LEAST_KEY} bytes, got {len(key)}")
    return hmac.new(key, digestmod=hashlib.sha256)
