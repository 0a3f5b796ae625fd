"""The error that a bad configuration raises, which `except ValueError` catches."""

import functools
from typing import Any

from huggingface_hub.errors import StrictDataclassError


class LoopedConfigError(StrictDataclassError, ValueError):
    """A field, or a combination of fields, that has no meaning; also a plain `ValueError`."""


def raise_value_errors(cls):
    """Turn a config class's strict dataclass errors into `LoopedConfigError`, which `except ValueError` catches."""

    def translate(method) -> Any:
        @functools.wraps(method)
        def wrapper(self, *args):
            try:
                return method(self, *args)
            except StrictDataclassError as error:
                if isinstance(error, ValueError):
                    raise
                raise LoopedConfigError(str(error.__cause__ or error)) from None  # the cause names the fields

        return wrapper

    cls.__setattr__ = translate(cls.__setattr__)
    validate = translate(cls.validate)
    validate.__is_defined_by_strict_decorator__ = True  # lets a subclass be @strict again
    cls.validate = validate
    return cls
