# SPDX-License-Identifier: Apache-2.0
"""The checkpoint of several ranks: a folder with one file per rank and a manifest that names them.

Each file is an ordinary checkpoint of the rank's columns. State without columns is in the file of
rank 0. Every save uses new file names and replaces the manifest atomically once all files exist, so
a crash leaves either the old checkpoint or the new one. The next successful save deletes files that
are not in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fastagg import checkpoint
from fastagg.checkpoint import CheckpointError
from fastagg.distributed.ranks import Ranks
from fastagg.tensor_file import RowsOf, TensorFileError, parse_json

FORMAT = "fastagg.sharded"
VERSION = 2
_UNSIGNED = 1  # the version before, without a digest
MANIFEST = "manifest.json"
_FURTHER = "columns."  # prefix of further tensors in a file
_GENERATION = re.compile(r"[0-9a-f]{16}")
_FILE = re.compile(r"[0-9a-f]{16}-\d{5,}-of-\d{5,}\.safetensors")  # names from Manifest.file


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        rule, num_params, segment: as for the aggregator.
        bounds: the columns (begin, end) of each file.
        generation: prefix of the files' names, new for each save.
        split: names of the state tensors that are spread by columns.
        columns: names of the further tensors.
        notes: notes of the caller.
    """

    rule: str
    num_params: int
    segment: int
    bounds: list[tuple[int, int]]
    generation: str
    split: list[str]
    columns: list[str]
    notes: dict[str, Any]

    def file(self, rank: int) -> str:
        """Return the name of a rank's file."""
        return f"{self.generation}-{rank:05}-of-{len(self.bounds):05}.safetensors"


def new_generation(ranks: Ranks) -> str:
    """Return a random prefix of file names, the same on all ranks."""
    return f"{ranks.share(secrets.randbits(62)):016x}"


def write(
    folder: str | os.PathLike[str],
    manifest: Manifest,
    options: Mapping[str, Any],
    state: Mapping[str, Tensor | RowsOf],
    columns: Mapping[str, Tensor],
    ranks: Ranks,
) -> None:
    """Write this rank's file and, once all ranks have done so, the manifest; see the module.

    Raises:
        OSError, TypeError, ValueError: this rank could not write.
        RankError: another rank could not write, or its further tensors have other names, shapes
            but for the columns, or dtypes.
    """
    target = Path(folder)
    own = target / manifest.file(ranks.rank)
    error: Exception | None = None
    text = ""
    alike = [(name, [*value.shape[:-1]], str(value.dtype)) for name, value in columns.items()]
    try:
        if ranks.rank == 0:  # its notes are stored
            text = _text(manifest)
        target.mkdir(parents=True, exist_ok=True)
        tensors = {**state, **{_FURTHER + name: value for name, value in columns.items()}}
        checkpoint.write(own, manifest.rule, options, tensors)
    except Exception as found:  # agree raises it after the other ranks know of it
        error = found
    try:
        ranks.agree("writing the checkpoint", [manifest.split, alike], error=error)
    except BaseException:
        with suppress(OSError):  # no manifest names this file
            own.unlink()
        raise
    if ranks.rank == 0:
        try:
            _check_shared(target, manifest)
            checkpoint.replace_text(target / MANIFEST, text)
        except Exception as found:  # agree raises it after the other ranks know of it
            error = found
    ranks.agree("writing the manifest", error=error)
    if ranks.rank == 0:
        for old in target.iterdir():
            if _FILE.fullmatch(old.name) and not old.name.startswith(manifest.generation):
                with suppress(OSError):  # the next save tries again
                    old.unlink()


def _text(manifest: Manifest) -> str:
    """Return the text of a manifest, which :func:`describe` accepts.

    Raises:
        TypeError, ValueError: JSON does not represent the notes, or they are too long.
    """
    try:
        given = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
        # What a reader gets: tuples are lists, and names are texts, perhaps one of them twice.
        header = parse_json(json.dumps(given, allow_nan=False))
        header["sha256"] = _digest(header)
        text = json.dumps(header, indent=1)
    except TypeError as error:
        raise TypeError(f"notes: expected values that JSON represents: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"notes: expected values that JSON represents: {error}") from error
    if len(text) > checkpoint.HEADER_LIMIT:
        raise ValueError(
            f"notes: expected a manifest of at most {checkpoint.HEADER_LIMIT} bytes, got "
            f"{len(text)}"
        )
    return text


def _digest(header: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its digest."""
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _check_shared(folder: Path, manifest: Manifest) -> None:
    """Check that this rank sees the files of all ranks."""
    names = [manifest.file(rank) for rank in range(len(manifest.bounds))]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise OSError(
            f"folder: expected a folder that all ranks share, but rank 0 does not see {missing} "
            f"in {folder}"
        )


@dataclass(frozen=True)
class Described:
    """What the manifest and the headers of all files say; no number of the state has been read.

    Attributes:
        manifest: the manifest.
        options: of the aggregator, from the file of rank 0.
        state_bytes: size of the state in all files.
    """

    manifest: Manifest
    options: dict[str, Any]
    state_bytes: int


def describe(folder: str | os.PathLike[str]) -> Described:
    """Read the manifest, and the headers of the files that it names.

    Raises:
        FileNotFoundError: there is no checkpoint.
        CheckpointError: the checkpoint is damaged, was not written by fastagg, or has another
            version of the format.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"folder: there is no checkpoint {path}")
    try:
        with path.open("rb") as file:
            text = file.read(checkpoint.HEADER_LIMIT + 1)
        if len(text) > checkpoint.HEADER_LIMIT:
            raise TensorFileError(f"expected at most {checkpoint.HEADER_LIMIT} bytes")
        header = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise CheckpointError(path, f"damaged: {error}") from error
    if not isinstance(header, dict) or header.pop("format", None) != FORMAT:
        raise CheckpointError(path, "not the manifest of a sharded checkpoint")
    version, stated = header.get("version"), header.pop("sha256", None)
    if version == _UNSIGNED and stated is None:
        warnings.warn(
            f"{path} was written by an older fastagg and has no checksum: damage to it may go "
            "unnoticed; save it again",
            stacklevel=3,
        )
    elif version == VERSION and stated != _digest({"format": FORMAT, **header}):
        raise CheckpointError(
            path, "damaged or changed since it was written: its checksum is wrong"
        )
    header.pop("version", None)
    if version not in (VERSION, _UNSIGNED):
        raise CheckpointError(
            path,
            f"has format version {version}, this fastagg reads versions {_UNSIGNED} and {VERSION}; "
            "load it with the fastagg that wrote it",
        )
    try:
        manifest = Manifest(**header)
    except TypeError as error:
        raise CheckpointError(path, f"damaged: {error}") from error
    wrong = _wrong_field(manifest)
    if wrong:
        raise CheckpointError(path, f"damaged: {wrong}: got {str(getattr(manifest, wrong))[:200]}")
    options: dict[str, Any] = {}
    state_bytes = 0
    for rank in range(len(manifest.bounds)):
        with checkpoint.opened(path.with_name(manifest.file(rank))) as saved:
            if rank == 0:
                options = saved.options
            state_bytes += sum(
                entry.nbytes
                for name, entry in saved.entries.items()
                if not name.startswith(_FURTHER)
            )
    return Described(manifest, options, state_bytes)


def _wrong_field(manifest: Manifest) -> str | None:
    """Return the name of a field of a manifest that is not as described, or None."""
    ends = [0]
    bounds: Any = manifest.bounds  # from JSON: anything
    whole = isinstance(bounds, list) and bool(bounds)
    for bound in bounds if whole else ():
        if not (isinstance(bound, list) and len(bound) == 2 and all(type(b) is int for b in bound)):
            return "bounds"
        if bound[0] != ends[-1] or bound[1] <= bound[0]:
            return "bounds"
        ends.append(bound[1])
    checks = {
        "rule": isinstance(manifest.rule, str),
        "num_params": type(manifest.num_params) is int and manifest.num_params >= 1,
        "segment": type(manifest.segment) is int and manifest.segment >= 1,
        "bounds": whole and ends[-1] == manifest.num_params,
        # part of the names of files, which therefore are in the folder
        "generation": isinstance(manifest.generation, str)
        and bool(_GENERATION.fullmatch(manifest.generation)),
        "split": _are_names(manifest.split),
        "columns": _are_names(manifest.columns),
        "notes": isinstance(manifest.notes, dict),
    }
    return next((name for name, valid in checks.items() if not valid), None)


def _are_names(value: object) -> bool:
    """Return whether a value from JSON is a list of different names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    return len(set(value)) == len(value)


def read(
    folder: str | os.PathLike[str],
    manifest: Manifest,
    begin: int,
    end: int,
    blocks: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read columns [begin, end) of the state and of the further tensors, and state without columns.

    Every file that is needed is read completely, because its checksum is that of all its bytes.
    ``blocks`` are the ``column_blocks`` of the rule. Ranks begin where a block begins.

    Returns:
        The state, and the further tensors.

    Raises:
        FileNotFoundError, ValueError: a file is missing, truncated or not of this checkpoint.
    """
    whole: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    split = [*manifest.split, *(_FURTHER + name for name in manifest.columns)]
    for rank, (first, last) in enumerate(manifest.bounds):
        apart = last <= begin or end <= first
        if rank > 0 and apart:
            continue
        with checkpoint.opened(Path(folder) / manifest.file(rank)) as saved:
            if saved.rule != manifest.rule or not set(split) <= set(saved.names):
                raise CheckpointError(
                    saved.path,
                    f"does not belong to {MANIFEST} in its folder: expected rule "
                    f"{manifest.rule!r} with the tensors {sorted(split)}, got rule {saved.rule!r} "
                    f"with {sorted(saved.names)}",
                )
            for name in split:
                width = -(-(last - first) // blocks.get(name, 1))
                if saved.entries[name].shape[-1:] != (width,):
                    raise CheckpointError(
                        saved.path,
                        f"{name}: expected {width} columns, as in {MANIFEST}, got shape "
                        f"{[*saved.entries[name].shape]}",
                    )
                kind = saved.entries[name].kind, saved.entries[name].shape[:-1]
                if kinds.setdefault(name, kind) != kind:
                    raise CheckpointError(
                        saved.path, f"{name}: expected {kinds[name]}, as in other files, got {kind}"
                    )
            wanted: dict[str, slice | None] = {}
            if rank == 0:
                wanted |= dict.fromkeys(set(saved.names) - set(split))
            if not apart:
                start, stop = max(begin, first) - first, min(end, last) - first
                for name in split:
                    block = blocks.get(name, 1)
                    wanted[name] = slice(start // block, -(-stop // block))
            for name, tensor in saved.read_columns(wanted).items():
                if name in split:
                    parts.setdefault(name, []).append(tensor)
                else:
                    whole[name] = tensor
    joined = {name: torch.cat(pieces, dim=-1) for name, pieces in parts.items()}
    further = {name: joined.pop(_FURTHER + name) for name in manifest.columns}
    return whole | joined, further
