"""The fields of a model's config, by whatever name a family gives them, checked when they are read.

Why: configs come from anywhere (G8): a number may be text, negative, or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shmcache.errors import WorkloadError

_COUNT_MAX: Final = 1 << 24


class Fields:
    """A config. Of several names for one thing, the first that is there and not null counts."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        for part in ("attn_config", "ssm_cfg"):  # where some families keep the half of it
            if isinstance(nested := config.get(part), dict):
                self._config = nested | self._config
        self.model_type = "unknown"
        self.model_type = self.text("model_type") or "unknown"

    def of_layer(self, place: int) -> Fields:
        """As this layer sees them: `per_layer_config` overrides some."""
        overrides = self._config.get("per_layer_config")
        if not isinstance(overrides, dict):
            return self
        for key, value in overrides.items():  # keys are indices with leading zeros
            if key.isdecimal() and int(key) == place and isinstance(value, dict):
                return Fields(self._config | value)
        return self

    def has(self, name: str) -> bool:
        """Whether it is there and says something."""
        return self._config.get(name) is not None

    def count(self, *names: str) -> int | None:
        """A whole number from 0 on; None where there is none."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 <= value <= _COUNT_MAX:
                raise self.unsupported(name, f"{value!r} is no number from 0 to {_COUNT_MAX}")
            return value
        return None

    def needed(self, *names: str) -> int:
        """A number from 1 on that must be there."""
        found = self.count(*names)
        if not found:
            raise self.missing(names[0])
        return found

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Yes or no."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.unsupported(name, f"{value!r} is neither true nor false")
        return value

    def text(self, *names: str) -> str | None:
        """A text."""
        for name in names:
            value = self._config.get(name)
            if value is not None:
                if not isinstance(value, str):
                    raise self.unsupported(name, f"{value!r} is no text")
                return value
        return None

    def texts(self, name: str) -> list[str] | None:
        """A list of texts."""
        return self._list(name, str)

    def numbers(self, name: str) -> list[int] | None:
        """A list of whole numbers."""
        return self._list(name, int)

    def _list(self, name: str, kind: type) -> list[Any] | None:
        values = self._config.get(name)
        if values is None:
            return None
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise self.unsupported(name, f"it is no list of {kind.__name__}")
        return values

    def missing(self, name: str) -> WorkloadError:
        """The error for a field that is not there."""
        return self.unsupported(name, "it is missing or 0")

    def unsupported(self, name: str, message: str) -> WorkloadError:
        """The error for a field that says what is not understood."""
        return WorkloadError.ConfigUnsupported(self.model_type, name, message)
