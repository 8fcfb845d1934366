"""Status codes: one table for C and Python."""

import re

import pytest
from helpers.compiler import INCLUDE

from kina import errors
from kina._core import status

CLASSES = [
    value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.KinaError) and value is not errors.KinaError
]


def header_enum(name: str) -> dict[str, int]:
    text = (INCLUDE / "kina_status.h").read_text()
    body = re.search(rf"enum {name} \{{(.*?)\}};", text, re.DOTALL).group(1)
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)}


def test_every_class_has_the_detail_code_of_the_header():
    assert {kind.__name__: kind.detail for kind in CLASSES} == status.detail_codes()


def test_the_header_has_no_code_that_python_lacks():
    assert sorted(header_enum("kina_detail").values()) == sorted(status.detail_codes().values())


def test_coarse_statuses_are_the_same_numbers():
    expected = {
        "KINA_SUCCESS" if each is errors.Status.SUCCESS else f"KINA_STATUS_{each.name}": each.value
        for each in errors.Status
    }
    assert header_enum("kina_status") == expected


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_class_is_also_a_fitting_builtin(kind):
    fitting = (ValueError, TypeError, MemoryError, BufferError, NotImplementedError, RuntimeError)
    assert sum(base in kind.__mro__ for base in fitting) in (1, 2)  # NotImplementedError is a RuntimeError
    raised = kind("words", operation="launch", driver_error=errors.DriverFailure(1, "NAME", "sentence"))
    assert raised.status == kind.detail // 100
    assert (raised.operation, raised.driver_error.code, str(raised)) == ("launch", 1, "words")
    assert errors.class_of_detail(kind.detail) is kind


def test_an_unknown_detail_is_an_internal_error():
    assert errors.class_of_detail(999) is errors.InternalError
