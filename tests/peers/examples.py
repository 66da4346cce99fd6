# SPDX-License-Identifier: Apache-2.0
"""Run the examples in docstrings of ByzFL's aggregators, with fastagg's callables.

``doctest`` cannot run them: continued lines start with ``>>>``, and the printed arrays have the
commas of one or the other of numpy's forms. An example is therefore the lines up to a result; the
kind of the result, its shape and its numbers are compared.
"""

from __future__ import annotations

import ast
import codeop
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

# numpy prints 8 decimals and torch 4, so that a printed number is off by at most half a unit of
# the last; the rest is for the rounding of float32 numbers of up to 10.
_KINDS: dict[str, tuple[type, float]] = {
    "array": (np.ndarray, 0.5e-8 + 1e-12),
    "tensor": (torch.Tensor, 0.5e-4 + 1e-6),
}


def read_examples(docstring: str) -> Iterator[tuple[list[str], str]]:
    """Yield each example of a docstring: its statements, and the text of the last one's result."""
    statements: list[str] = []
    pending: list[str] = []
    result: list[str] = []
    for line in [*docstring.splitlines(), ""]:
        text = line.strip()
        if text.startswith(">>>"):
            pending.append(text[3:])
            source = "\n".join(part.strip() if i == 0 else part for i, part in enumerate(pending))
            if codeop.compile_command(source, symbol="single") is not None:
                statements.append(source)
                pending = []
        elif text and statements and (result or text.startswith(tuple(_KINDS))):
            result.append(text)
        elif result:
            yield statements, " ".join(result)
            statements, result = [], []
    if pending or statements:
        raise ValueError(f"an example without a result: {[*statements, *pending]}")


def compare(found: Any, printed: str) -> str | None:
    """Return how a result differs from a printed one, None if it does not."""
    kind, _, inner = printed.partition("(")
    expected_type, tolerance = _KINDS[kind]
    if not isinstance(found, expected_type):
        return f"expected an object of {expected_type}, got {type(found)}"
    rows = [
        [float(number) for number in re.findall(r"[-+.\d][-+.\deE]*", row)]
        for row in re.findall(r"\[([^\[\]]+)\]", inner)
    ]
    expected = np.array(rows if inner.startswith("[[") else rows[0])
    values = np.asarray(found, dtype=np.float64)
    if values.shape != expected.shape or not np.abs(values - expected).max() <= tolerance:
        return f"expected {printed}, got {found}"
    return None


def run_examples(
    sources: list[Path], module: Any, differences: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Run the examples of all classes in ``sources`` with those of ``module``, imported as byzfl.

    Args:
        differences: reason by name of the example, ``CLASS NUMBER`` with numbers from 1. Such an
            example must give another result.

    Returns:
        The number of examples that give the printed result, and what is not as expected.
    """
    equal, problems, unused = 0, [], set(differences)
    for source in sources:
        for node in ast.parse(source.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            names: dict[str, Any] = {}
            docstring = ast.get_docstring(node) or ""
            for number, (statements, printed) in enumerate(read_examples(docstring), start=1):
                name = f"{node.name} {number}"
                unused.discard(name)
                difference = compare(_evaluate(statements, names, module), printed)
                if name in differences and difference is None:
                    problems.append(f"{name}: expected another result ({differences[name]})")
                elif name not in differences and difference is not None:
                    problems.append(f"{name}: {difference}")
                equal += difference is None
    return equal, problems + [f"{name} is no example" for name in sorted(unused)]


def _evaluate(statements: list[str], names: dict[str, Any], module: Any) -> Any:
    """Execute the statements but the last one, with ``names``, and return the value of that."""
    for statement in statements[:-1]:
        if statement == "import byzfl":
            names["byzfl"] = module
        else:
            exec(statement, names)
    return eval(statements[-1], names)
