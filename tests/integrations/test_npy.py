# SPDX-License-Identifier: Apache-2.0
"""Headers of .npy files, against NumPy's reader and a parser of Python literals."""

import ast
import gc
import io
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastagg.integrations._npy import npy_header, read_header, view

TOKENS = "{ } 'descr' 'fortran_order' 'shape' : , '<f4' '|b1' True False ( ) (2,) () 12 07 '"
GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"


def file_of(text: str) -> bytes:
    """Return a .npy file of version 1.0 with this text in its header, and no values."""
    data = text.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8", "|b1", "|u1", "<i8", ">u2", "<c8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 2), (1, 2, 3, 4)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_reads_what_numpy_writes(dtype: str, shape: tuple[int, ...], order: str) -> None:
    array = np.arange(1, 1 + int(np.prod(shape))).reshape(shape).astype(dtype, order=order)
    data = saved(array)
    header = read_header(data)
    assert (header.dtype, header.shape) == (array.dtype, shape)
    assert np.array_equal(view(data, header), np.load(io.BytesIO(data)))
    assert view(data, header).dtype == array.dtype


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_reads_every_version(version: tuple[int, int]) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ones((2, 3), np.float32), version)
    header = read_header(stream.getvalue())
    assert (header.dtype, header.shape, header.fortran) == (np.float32, (2, 3), False)
    assert view(stream.getvalue(), header).tolist() == [[1.0] * 3] * 2


def test_the_header_of_a_file_is_numpys() -> None:
    assert saved(np.zeros((2, 3), np.float32)).startswith(npy_header("float32", (2, 3)))


@pytest.mark.parametrize(
    "text",
    [
        '{"descr": "<f4", "fortran_order": False, "shape": (2, 3)}',  # other quotes, no comma
        "{'shape': (2, 3,), 'descr': '<f4', 'fortran_order': False}\n",  # another order
        "{'descr':'<f4','fortran_order':False,'shape':(2,3)}    ",  # no spaces
        "{ 'descr' : '<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 ) , }",
    ],
)
def test_reads_what_other_writers_write(text: str) -> None:
    header = read_header(file_of(text))
    assert (header.dtype, header.shape, header.fortran) == (np.float32, (2, 3), False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("'<f4'", "'|O'"), "plain numbers"),
        (GOOD.replace("'<f4'", "[('a', '<f4')]"), "plain numbers"),
        (GOOD.replace("'<f4'", "'<f3'"), "f3"),
        (GOOD.replace("'descr': '<f4', ", ""), "plain numbers"),
        (GOOD.replace("'fortran_order': False", "'fortran_order': 0"), "plain numbers"),
        (GOOD.replace("(2, 3)", "(6)"), "shape"),
        (GOOD.replace("(2, 3)", "(02, 3)"), "plain numbers"),  # no literal of Python
        (GOOD.replace("(2, 3)", "6"), "plain numbers"),
        (GOOD.replace("(2, 3)", "(,)"), "plain numbers"),
        (GOOD.replace("(2, 3)", "(-2, -3)"), "plain numbers"),
        (GOOD.replace("(2, 3)", "(2.0, 3)"), "plain numbers"),
        (GOOD.replace("(2, 3)", f"(2, {'9' * 5000})"), "npy header"),
        (GOOD.replace("(2, 3)", "exit(1)"), "plain numbers"),
        (GOOD + " + 1", "plain numbers"),
        (GOOD[1:], "plain numbers"),
        (GOOD[:-1], "plain numbers"),
        (GOOD.replace("}", "'more': (1,), }"), "plain numbers"),
        (GOOD.replace("}", "'descr': '<f8', }"), "plain numbers"),  # given twice
        ("", "plain numbers"),
        ("(" * 9000, "plain numbers"),
    ],
)
def test_other_headers_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_header(file_of(text))
    assert len(str(caught.value)) < 400


def test_a_file_of_another_length_is_refused() -> None:
    data = saved(np.zeros((2, 3), np.float32))
    for wrong, size in ((data[:-1], 23), (data + b"\0", 25)):
        with pytest.raises(ValueError, match=f"expected 24 bytes after the header, got {size}"):
            view(wrong, read_header(wrong))


@given(
    st.lists(st.sampled_from([*TOKENS.split(), " "])).map("".join)
    | st.permutations(["'descr': '<f4'", "'fortran_order': True", "'shape': (2, 3)"])
    .flatmap(lambda entries: st.sampled_from([", ", ",", " ,\n"]).map(lambda s: s.join(entries)))
    .map("{{{}}}".format)
)
def test_accepts_only_what_the_literal_says(text: str) -> None:
    try:
        header = read_header(file_of(text))
    except ValueError:
        return
    fields = ast.literal_eval(text.strip())
    assert fields == {
        "descr": fields["descr"],
        "fortran_order": header.fortran,
        "shape": header.shape,
    }
    assert np.dtype(fields["descr"]) == header.dtype


@pytest.fixture
def switching() -> Iterator[None]:
    """Let the garbage collector run often, and other threads run in it."""
    before = gc.get_threshold()

    def yield_to_others(*_: object) -> None:
        time.sleep(0)

    gc.callbacks.append(yield_to_others)
    gc.set_threshold(10)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(yield_to_others)


@pytest.mark.usefixtures("switching")
def test_threads_read_at_the_same_time() -> None:
    """With ``ast.literal_eval`` on Python 3.11, some of these calls raise a SystemError."""
    problems: list[BaseException] = []

    def read(first: int) -> None:
        try:
            for second in range(1500):  # each header once, so that none is remembered
                shape = (first, second)
                text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
                assert read_header(file_of(text)).shape == shape
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
