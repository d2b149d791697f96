"""One test of a whole table: what differs only in a word or a number needs no test of its own."""

import functools
import inspect

import pytest


def each_row(names, table):
    """Like pytest.mark.parametrize(names, table), but all rows are one test, which names the row
    that fails. Each row has a folder tmp_path of its own, and its monkeypatch ends with it. (No row
    but the last may skip: the rows behind it would not run.)"""
    names = names.replace(",", " ").split()

    def make_test(function):
        @functools.wraps(function)
        def test(**fixtures):
            for number, row in enumerate(table):
                values = {names[0]: row}
                if len(names) > 1:
                    values = dict(zip(names, row, strict=True))
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = fixtures["tmp_path"] / f"row-{number}"
                    own["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = patch
                    try:
                        function(**own, **values)
                    except (Exception, pytest.fail.Exception) as error:
                        raise AssertionError(f"row {number}: {row}") from error

        parameters = inspect.signature(function).parameters.values()
        shared = [parameter for parameter in parameters if parameter.name not in names]
        test.__signature__ = inspect.Signature(shared)
        return test

    return make_test
