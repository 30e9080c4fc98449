"""The JSON form of the types here: a variant is its bare name, or an object with one key.

Why: the manifests of this format write `"full"` and `{"sliding": {"window": 8}}`; msgspec's tagged
unions say `{"kind": "sliding", "window": 8}`. Plain values are rewritten between the two by the
annotation of each position, never by what a key is called.

Contract: a variant with named fields is `{"tag": {fields}}`, one with an unnamed field
`{"tag": value}`, one without fields `"tag"`; anything else in such a position is a
`msgspec.ValidationError`. Unknown keys of structs are ignored. A `LayerSchedule` is an array.

Cost: positions without payload enums below them are not walked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from shmcache.policy.attention import LayerSchedule
from shmcache.policy.fields import alternatives, hints
from shmcache.policy.payload import PayloadEnum

_T = TypeVar("_T")
_Rewrite: TypeAlias = Callable[[Any], Any]


def to_wire(value: Any) -> Any:
    """`value`, one of the package's policy types, as plain dicts and lists in the JSON form."""
    plain = msgspec.to_builtins(value, enc_hook=enc_hook)
    kind: Any = type(value)
    rewrite = _rewriter(kind, _outward)
    return rewrite(plain) if rewrite else plain


def from_wire(kind: type[_T], plain: Any) -> _T:
    """The value of type `kind` that `plain`, in the JSON form, stands for.

    Errors: `msgspec.ValidationError`.
    """
    hint: Any = kind.union if issubclass(kind, PayloadEnum) else kind
    rewrite = _rewriter(hint, _inward)
    internal = rewrite(plain) if rewrite else plain
    made: _T = msgspec.convert(internal, hint, strict=True, dec_hook=dec_hook)
    return made


def enc_hook(value: Any) -> Any:
    """For msgspec encoders: how a `LayerSchedule` is written."""
    if isinstance(value, LayerSchedule):
        return list(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def dec_hook(hint: Any, plain: Any) -> Any:
    """For msgspec decoders: how a `LayerSchedule` is read."""
    if get_origin(hint) is not LayerSchedule:
        raise NotImplementedError(f"cannot decode {hint}")
    layers: Any = tuple[get_args(hint)[0], ...]  # type: ignore[misc]
    return LayerSchedule(msgspec.convert(plain, layers, strict=True))


_Direction: TypeAlias = Callable[[type[PayloadEnum]], _Rewrite]


@cache
def _rewriter(hint: Any, direction: _Direction) -> _Rewrite | None:
    """How to rewrite a plain value at a position annotated `hint`; None if nothing needs it."""
    kind = alternatives(hint)[0]
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated or (origin is tuple and args[-1] is not Ellipsis):
        return None
    if origin is not None:
        element = _rewriter(args[0], direction)
        return _each(element) if element else None
    if not issubclass(kind, msgspec.Struct):
        return None
    return direction(kind.family()) if issubclass(kind, PayloadEnum) else _fields(kind, direction)


def _each(rewrite: _Rewrite) -> _Rewrite:
    return lambda plain: list(map(rewrite, plain)) if isinstance(plain, list | tuple) else plain


@cache
def _fields(kind: type[msgspec.Struct], direction: _Direction) -> _Rewrite | None:
    found = {name: _rewriter(hint, direction) for name, hint in hints(kind).items()}
    rewrites = [(name, rewrite) for name, rewrite in found.items() if rewrite]

    def rewrite(plain: Any) -> Any:
        if not isinstance(plain, dict):
            return plain
        changed = {name: one(plain[name]) for name, one in rewrites if name in plain}
        return {**plain, **changed}

    return rewrite if rewrites else None


def _inward(family: type[PayloadEnum]) -> _Rewrite:
    """`"tag"` and `{"tag": payload}` to `{..., "kind": "tag"}`."""

    def rewrite(plain: Any) -> Any:
        bare = isinstance(plain, str)
        if not (bare or (isinstance(plain, dict) and len(plain) == 1)):
            raise msgspec.ValidationError(f"{family.__name__} must be a name or have one key")
        tag, payload = (plain, {}) if bare else next(iter(plain.items()))
        variant = family.variants.get(tag)
        if variant is None:
            raise msgspec.ValidationError(f"{family.__name__} has no variant {tag!r}")
        names = variant.__struct_fields__
        if bare == bool(names):
            needs = "a payload" if bare else "no payload"
            raise msgspec.ValidationError(f"{family.__name__} {tag!r} takes {needs}")
        if names == ("value",):
            payload = {"value": payload}
        fields = _fields(variant, _inward)
        payload = fields(payload) if fields else payload
        if not isinstance(payload, dict):
            raise msgspec.ValidationError(f"{family.__name__} {tag!r} takes an object")
        return {**payload, "kind": tag}  # last: a key of the input cannot replace it

    return rewrite


def _outward(family: type[PayloadEnum]) -> _Rewrite:
    """`{"kind": "tag", ...}` to `"tag"` or `{"tag": payload}`."""

    def rewrite(plain: dict[str, Any]) -> Any:
        tag = plain["kind"]
        variant = family.variants[tag]
        fields = _fields(variant, _outward)
        payload = {name: value for name, value in plain.items() if name != "kind"}
        payload = fields(payload) if fields else payload
        if variant.__struct_fields__ == ("value",):
            return {tag: payload["value"]}
        return {tag: payload} if payload else tag

    return rewrite
