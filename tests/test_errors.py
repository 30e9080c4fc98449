"""Errors are values: comparable, picklable, readable. New families join by one line in FAMILIES."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import errno
import pickle
from contextlib import contextmanager
from dataclasses import field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import pytest

from shmcache.errors import (
    CacheIoExecutionStateError,
    CacheIoWorkerError,
    CacheLifecycleError,
    CachePolicyError,
    CachePoolError,
    CacheResidencyConfigurationError,
    CacheResidencyError,
    CacheStorageError,
    ContractError,
    DumpError,
    LayerScheduleError,
    LiveCachePublicationError,
    PromptCacheError,
    PromptCachePersistenceError,
    RefusedCheck,
    SegmentError,
    TraceError,
    WorkloadError,
    size_text,
)
from shmcache.errors.base import variant
from shmcache.policy.identity import CacheBlockId, CacheRepresentation, CacheTier
from shmcache.states.storage import CacheIoOperationKey, CacheIoOperationKind, CacheStoragePhase

if TYPE_CHECKING:
    from collections.abc import Iterator

FAMILIES: tuple[type[ContractError], ...] = (
    CachePoolError,
    SegmentError,
    CacheLifecycleError,
    CacheStorageError,
    CacheIoExecutionStateError,
    CacheIoWorkerError,
    LayerScheduleError,
    CachePolicyError,
    PromptCacheError,
    PromptCachePersistenceError,
    LiveCachePublicationError,
    CacheResidencyConfigurationError,
    CacheResidencyError,
    TraceError,
    WorkloadError,
    DumpError,
)


class Axis(Enum):
    HOST = "host_axis"


BLOCK = CacheBlockId(
    session_id=9,
    global_layer=41,
    representation=CacheRepresentation.KEY_VALUE,
    start=64,
    end=96,
    rank=None,
)
WRITE, READ = CacheIoOperationKind.WRITE, CacheIoOperationKind.READ
PHASE = CacheStoragePhase.HOST_UNBACKED
KEY = CacheIoOperationKey(310, BLOCK, WRITE)
SAMPLES: tuple[tuple[ContractError, tuple[str, ...]], ...] = (
    (CachePoolError.InvalidLimits("device_bytes_zero", "why not"), ("device_bytes_zero",)),
    (CachePoolError.DuplicateManager(41), ("41",)),
    (CachePoolError.UnknownManager(2**64 - 1), ("18446744073709551615",)),
    (CachePoolError.BudgetExceeded(Axis.HOST, 26, 20), ("host_axis", "26", "20")),
    (CachePoolError.AccountingOverflow("manager_publication"), ("manager_publication",)),
    (CachePoolError.Poisoned(), ("poisoned",)),
    (SegmentError.Exists("llm"), ("'llm'",)),
    (SegmentError.NotFound("llm"), ("'llm'",)),
    (SegmentError.Refused("mode", 0o600, 0o644), ("mode", "0o600", "0o644")),
    (SegmentError.NoSpace(2254857830, 64 << 20, "--shm-size"), ("2254857830", "64 MiB", "--shm")),
    (SegmentError.OwnersFull(64), ("64",)),
    (SegmentError.TableFull("managers", 1024), ("managers", "1024", "managers_max")),
    (SegmentError.LiveDirectoriesFull(400, 384), ("400", "384", "shorter paths")),
    (SegmentError.LockHeld(77, "T", 10_000_000_000), ("77", "T", "10000000000", "-CONT 77")),
    (SegmentError.Retired("llm"), ("'llm'",)),
    (SegmentError.Corrupt("index word 5"), ("index word 5",)),
    (SegmentError.ArenaFull(4097, ((7, 8192), (9, 64))), ("4097", "7", "8192", "9", "64")),
    (SegmentError.BlockTooLarge(4097, 2049), ("4097", "2049", "block_bytes_max")),
    (SegmentError.NoArena("llm"), ("'llm'", "arena_bytes")),
    (SegmentError.InUse((7, 9)), ("7", "9")),
    (SegmentError.Closed("llm"), ("'llm'",)),
    (SegmentError.HostError("mmap", "ENOMEM"), ("mmap", "ENOMEM")),
    (CacheLifecycleError.DuplicateBlock(BLOCK), ("41", "64", "96")),
    (CacheLifecycleError.MissingBlock(BLOCK), ("41", "64", "96")),
    (CacheLifecycleError.DuplicateRemoval(), ("twice",)),
    (CacheLifecycleError.BlockLeased(BLOCK), ("41", "64", "96")),
    (CacheLifecycleError.UnexpectedLeaseCount(BLOCK, 77, 78), ("41", "77", "78")),
    (CacheLifecycleError.LeaseOverflow(BLOCK), ("41", "64", "96")),
    (CacheLifecycleError.LeaseUnderflow(BLOCK), ("41", "64", "96")),
    (CacheLifecycleError.AccessClockOverflow(), ("clock",)),
    (CacheStorageError.BlockMismatch(BLOCK, "another"), ("41", "another")),
    (CacheStorageError.InvalidPhase(PHASE, CacheStoragePhase.DEVICE), ("host_unbacked", "device")),
    (CacheStorageError.IoNotPending(PHASE), ("host_unbacked",)),
    (CacheStorageError.BackingAlreadyExists(), ("backing",)),
    (CacheStorageError.BackingRequired(), ("backing",)),
    (CacheStorageError.HostDemotionMismatch(310, 311), ("310", "311")),
    (CacheStorageError.IoMismatch(KEY, "another"), ("310", "41", "another")),
    (CacheStorageError.IoKindMismatch(WRITE, READ), ("write", "read")),
    (CacheIoExecutionStateError.ZeroCapacity(), ("at least one",)),
    (CacheIoExecutionStateError.UnknownOperation(), ("no operation",)),
    (CacheIoExecutionStateError.InvalidAdmission(), ("admitted",)),
    (CacheIoExecutionStateError.InvalidAdmissionRollback(), ("rolled back",)),
    (CacheIoExecutionStateError.InvalidStart(), ("start",)),
    (CacheIoExecutionStateError.InvalidCompletion(), ("complete",)),
    (CacheIoExecutionStateError.OperationStillOwned(), ("queued or running",)),
    (CacheIoWorkerError.Poisoned(), ("poisoned",)),
    (CacheIoWorkerError.OperationFailed("no space"), ("no space",)),
    (CacheIoWorkerError.Cancelled(2**64 - 1), ("18446744073709551615",)),
    (CacheIoWorkerError.Spawn("disk", RuntimeError("full")), ("'disk'", "full")),
    (CacheIoWorkerError.Execution(CacheIoExecutionStateError.InvalidStart()), ("start",)),
    (LayerScheduleError.Empty(), ("at least one",)),
    (LayerScheduleError.LayerCount(41, 77), ("41", "77")),
    (LayerScheduleError.ZeroWindow(), ("window",)),
    (LayerScheduleError.MissingWindow(), ("window",)),
    (LayerScheduleError.WindowOutOfRange(2**31), ("2147483648",)),
    (CachePolicyError.Invalid("not_positive", "head_dim is 0"), ("not_positive", "head_dim is 0")),
    (PromptCacheError.Policy(CachePolicyError.Invalid("no_state_tensors")), ("no_state_tensors",)),
    (PromptCacheError.UnsupportedSchema(7), ("7",)),
    (PromptCacheError.Malformed("frontier", "layer 3"), ("frontier", "layer 3")),
    (PromptCacheError.Incompatible("geometry", "why"), ("geometry", "why")),
    (PromptCacheError.PrefixIdentityMismatch(), ("prefix",)),
    (
        PromptCachePersistenceError.PromptCache(PromptCacheError.UnsupportedSchema(7)),
        ("schema 7",),
    ),
    (
        PromptCachePersistenceError.Io("sync_file", Path("/c/x"), OSError(errno.ENOSPC, "full")),
        ("sync_file", "/c/x", "full", "free disk space"),
    ),
    (PromptCachePersistenceError.ManifestJson(ValueError("why")), ("why",)),
    (PromptCachePersistenceError.MalformedStorage("current_length", "why"), ("current_length",)),
    (PromptCachePersistenceError.UnsafeShardPath("../x"), ("'../x'",)),
    (PromptCachePersistenceError.MissingShard(Path("/c/x")), ("/c/x",)),
    (
        PromptCachePersistenceError.MalformedShard(Path("/c/x"), "offsets", "why"),
        ("/c/x", "offsets", "why"),
    ),
    (PromptCachePersistenceError.InvalidPromptCachePath(Path("/c/x")), ("/c/x",)),
    (PromptCachePersistenceError.PromptCacheExists(Path("/c/x")), ("/c/x",)),
    (
        PromptCachePersistenceError.InvalidReversiblePublication("publish", "ended"),
        ("publish", "ended"),
    ),
    (
        LiveCachePublicationError.Io("link_live_block", Path("/c/x"), OSError(errno.EIO, "no")),
        ("link_live_block", "/c/x", "no"),
    ),
    (
        CacheResidencyConfigurationError.InvalidOptions("device_budget_zero", "why"),
        ("device_budget_zero", "why"),
    ),
    (
        CacheResidencyConfigurationError.Pool(CachePoolError.InvalidLimits("device_bytes_zero")),
        ("device_bytes_zero",),
    ),
    (CacheResidencyError.Pool(CachePoolError.UnknownManager(41)), ("41",)),
    (CacheResidencyError.Lifecycle(CacheLifecycleError.MissingBlock(BLOCK)), ("41", "64", "96")),
    (CacheResidencyError.Storage(CacheStorageError.BackingRequired()), ("backing",)),
    (CacheResidencyError.IoExecution(CacheIoWorkerError.Cancelled(77)), ("77",)),
    (CacheResidencyError.Policy(CachePolicyError.Invalid("not_positive")), ("not_positive",)),
    (CacheResidencyError.PromptCache(PromptCacheError.UnsupportedSchema(7)), ("schema 7",)),
    (CacheResidencyError.InvalidOptions("why"), ("why",)),
    (CacheResidencyError.InvalidTokenRange(96, 64), ("96", "64")),
    (CacheResidencyError.ArrayMismatch("layer 41: why"), ("layer 41: why",)),
    (CacheResidencyError.MissingResidentArrays(BLOCK), ("41", "64", "96")),
    (CacheResidencyError.BudgetExceeded(CacheTier.HOST, 26, 20), ("host", "26", "20")),
    (CacheResidencyError.LiveDiskRequired(26, 20), ("26", "20", "with_live_disk")),
    (CacheResidencyError.ManagerPoisoned(), ("unusable",)),
    (CacheResidencyError.DiskOperationCancelled(77), ("77",)),
    (CacheResidencyError.Runtime("why"), ("why",)),
    (
        CacheResidencyError.Io("unlink_live_block", Path("/c/x"), OSError(errno.EIO, "no")),
        ("unlink_live_block", "/c/x", "no"),
    ),
    (TraceError.Unreadable("a.jsonl", "no such file"), ("'a.jsonl'", "no such file")),
    (TraceError.Malformed(3, "why"), ("line 3", "why")),
    (WorkloadError.PackageMissing("gguf", "pip install gguf"), ("gguf", "`pip install gguf`")),
    (WorkloadError.ModelUnsupported("a.gguf", "it has no x"), ("a.gguf", "it has no x")),
    (WorkloadError.ConfigUnreadable("a/config.json", "why"), ("'a/config.json'", "why")),
    (WorkloadError.ConfigUnsupported("gpt9", "n_head", "why"), ("'gpt9'", "n_head", "why")),
    (WorkloadError.PagesMissing("some/docs"), ("some/docs", "*.md")),
    (DumpError.Unreadable("a.dump", "no such file"), ("'a.dump'", "no such file")),
    (DumpError.Unwritable("a.dump", "no room"), ("'a.dump'", "no room")),
    (DumpError.Damaged("a.dump", "why"), ("'a.dump'", "why", "shmcache dump")),
    (DumpError.Version("layout", 4, 3), ("layout 3", "reads 4")),
)
IDS = [type(error).__qualname__ for error, _ in SAMPLES]
each_sample = pytest.mark.parametrize(("error", "parts"), SAMPLES, ids=IDS)


def variants(family: type[ContractError]) -> list[type[ContractError]]:
    return [value for value in vars(family).values() if isinstance(value, type)]


def test_every_variant_has_a_sample() -> None:
    declared = [cls for family in FAMILIES for cls in variants(family)]
    assert declared == [type(error) for error, _ in SAMPLES]


@pytest.mark.parametrize("family", FAMILIES)
def test_variants_are_nested_under_their_family(family: type[ContractError]) -> None:
    unbound = [value for value in vars(family).values() if str(value).startswith("_")]
    assert not unbound  # a listed name without a class
    for cls in variants(family):
        assert issubclass(cls, family)
        assert cls.__qualname__ == f"{family.__name__}.{cls.__name__}"
        assert getattr(family, cls.__name__) is cls
        assert cls.__doc__


@each_sample
def test_pickle_and_copy_keep_the_error(error: ContractError, parts: tuple[str, ...]) -> None:
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, 6)]
    for twin in [*copies, copy.copy(error), copy.deepcopy(error)]:
        assert twin is not error
        assert type(twin) is type(error)
        assert twin == error
        assert hash(twin) == hash(error)
        assert (str(twin), repr(twin.args)) == (str(error), repr(error.args))


@each_sample
def test_text_names_every_payload_value(error: ContractError, parts: tuple[str, ...]) -> None:
    for part in parts:
        assert part in str(error)
    assert "\n" not in str(error)
    assert str(error).endswith(error.hint)


@each_sample
def test_family_and_root_catch_it(error: ContractError, parts: tuple[str, ...]) -> None:
    family = type(error).__bases__[0]
    for base in (type(error), family, ContractError):
        with pytest.raises(base) as caught:
            raise error
        assert caught.value is error
    assert not isinstance(error, (OSError, ValueError))


@each_sample
def test_each_payload_field_is_part_of_equality(
    error: ContractError, parts: tuple[str, ...]
) -> None:
    for position, value in enumerate(error.args):
        if type(error)._payload[position] in type(error)._prose:
            continue
        changed = [*error.args]
        # A cause must be an exception, whatever else is wrong with it.
        other = EOFError("changed") if isinstance(value, Exception) else (value, "changed")
        changed[position] = other
        assert type(error)(*changed) != error


@each_sample
def test_wrong_number_of_arguments(error: ContractError, parts: tuple[str, ...]) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        type(error)(*error.args, "too many")  # type: ignore[call-arg]
    if error.args:
        with pytest.raises(TypeError, match="missing"):
            type(error)()


def test_i14_a_cancelled_operation_is_no_cancelled_coroutine() -> None:
    """asyncio and concurrent.futures treat their own as a request to the waiter."""

    error = CacheIoWorkerError.Cancelled(21)
    foreign = (asyncio.CancelledError, concurrent.futures.CancelledError)
    assert not isinstance(error, foreign)
    wrapped = CacheIoWorkerError.Execution(CacheIoExecutionStateError.InvalidStart())
    assert wrapped.__cause__ is wrapped.error
    assert str(wrapped) == str(wrapped.error)
    spawned = CacheIoWorkerError.Spawn("disk", RuntimeError("full"))
    assert spawned.__cause__ is spawned.source


def test_keywords_and_positions_make_the_same_error() -> None:
    by_name = CachePoolError.BudgetExceeded(budget=20, resource=Axis.HOST, required=26)
    assert by_name == CachePoolError.BudgetExceeded(Axis.HOST, 26, 20)
    assert (by_name.resource, by_name.required, by_name.budget) == by_name.args
    assert repr(by_name).startswith("CachePoolError.BudgetExceeded(<Axis.HOST")


def test_equal_payload_of_another_variant_is_another_error() -> None:
    one, other = CachePoolError.DuplicateManager(3), CachePoolError.UnknownManager(3)
    assert len({one, other, CachePoolError.UnknownManager(3)}) == 2
    assert one != other
    assert one != 3


def test_a_message_is_shown_and_not_compared() -> None:
    bare = CachePoolError.InvalidLimits("device_bytes_zero")
    told = CachePoolError.InvalidLimits(code="device_bytes_zero", message="a device holds memory")
    assert bare.message == ""
    assert bare == told
    assert hash(bare) == hash(told)
    assert ": a device holds memory: " in str(told)
    assert bare != CachePoolError.InvalidLimits("transfer_in_flight_bytes_zero")


@pytest.mark.parametrize("family", [ContractError, *FAMILIES])
def test_a_family_alone_says_nothing(family: type[ContractError]) -> None:
    with pytest.raises(TypeError, match="family"):
        family()


def test_errors_pass_through_context_managers_with_notes() -> None:
    @contextmanager
    def noted() -> Iterator[None]:
        try:
            yield
        except ContractError as error:
            error.add_note("while testing")
            raise

    with pytest.raises(SegmentError.Closed) as caught, noted():
        raise SegmentError.Closed("llm") from KeyError("cause")
    assert isinstance(caught.value.__cause__, KeyError)
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == ["while testing"]


# Segment errors: what to do next ------------------------------------------------------------------


def test_no_space_reads_as_a_sentence_with_the_knob() -> None:
    error = SegmentError.NoSpace(needed=2254857830, available=64 << 20, knob="--shm-size")
    assert str(error) == (
        "the pool needs 2.1 GiB (2254857830 bytes), 64 MiB can be had: "
        "raise --shm-size or lower host_bytes"
    )


@pytest.mark.parametrize("check", get_args(RefusedCheck))
def test_every_check_has_its_own_hint(check: RefusedCheck) -> None:
    error = SegmentError.Refused(check, "this", "that")
    assert error.hint
    assert str(error) == f"the segment failed the check {check}: expected this, found that: " + (
        error.hint
    )


def test_a_check_of_a_newer_release_is_still_readable() -> None:
    payload: Any = "colour"
    assert "colour" in str(SegmentError.Refused(payload, "red", "blue"))


def test_host_error_of_an_os_error() -> None:
    made = SegmentError.HostError.of("fstat", OSError(errno.EACCES, "no"))
    assert made == SegmentError.HostError("fstat", "EACCES")
    assert "check the mode" in made.hint
    assert SegmentError.HostError.of("fstat", OSError("odd")).errno_name == "errno 0"
    assert SegmentError.HostError("fstat", "EXDEV").hint == ""


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1025, "1 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (64 << 20, "64 MiB"),
        (2254857830, "2.1 GiB"),
        (2**64 - 1, "16 EiB"),
        (1 << 80, "1048576 EiB"),
    ],
)
def test_size_text(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
    exact = size_text(size_bytes, exact=True)
    assert exact in (text, f"{text} ({size_bytes} bytes)")
    assert (exact == text) == (size_bytes in (0, 1023, 1024, 1536, 64 << 20, 1 << 80))


# Declaring a family -------------------------------------------------------------------------------


class SampleError(ContractError):
    Io: TypeAlias = "_SampleIo"
    Wrapped: TypeAlias = "_SampleWrapped"
    Torn: TypeAlias = "_SampleTorn"


@variant("{action} of {path} failed: {source}", cause="source")
class _SampleIo(SampleError):
    action: str
    path: str
    source: Exception


@variant("{error}", cause="error")
class _SampleWrapped(SampleError):
    error: ContractError


@variant("{path} is torn: {code}")
class _SampleTorn(SampleError):
    path: str
    code: str
    message: str = field(default="", compare=False)


def test_a_cause_is_payload_and_cause() -> None:
    inner = CachePoolError.UnknownManager(3)
    error = SampleError.Wrapped(inner)
    assert error.__cause__ is inner
    assert str(error) == str(inner)
    twin = pickle.loads(pickle.dumps(error))
    assert twin == error
    assert twin.__cause__ == inner


def test_a_foreign_exception_compares_by_type_and_errno() -> None:
    error = SampleError.Io("open", "/x", OSError(errno.ENOENT, "gone"))
    assert pickle.loads(pickle.dumps(error)) == error
    assert error == SampleError.Io("open", "/x", OSError(errno.ENOENT, "other words"))
    assert error != SampleError.Io("open", "/x", OSError(errno.EIO, "gone"))
    assert error != SampleError.Io("open", "/x", EOFError("gone"))
    disk_full = SampleError.Io("write", "/x", OSError(errno.ENOSPC, "no"))
    assert disk_full != SampleError.Io("write", "/x", OSError(errno.EIO, "no"))  # one type
    assert isinstance(error.__cause__, OSError)


def test_message_after_other_fields() -> None:
    error = SampleError.Torn("/x", "short", "3 of 8 bytes")
    assert str(error) == "/x is torn: short: 3 of 8 bytes"
    assert error == SampleError.Torn("/x", "short")
    assert pickle.loads(pickle.dumps(error)).message == "3 of 8 bytes"


def test_a_text_must_name_every_field() -> None:
    class _SampleSilent(SampleError):
        what: str

    setattr(SampleError, "Silent", "_SampleSilent")  # noqa: B010 (unknown to the type checker)
    with pytest.raises(TypeError, match=r"_SampleSilent does not name \['what'\]"):
        variant("something is wrong")(_SampleSilent)


def test_a_variant_must_be_listed_by_its_family() -> None:
    class _SampleUnlisted(SampleError):
        pass

    with pytest.raises(TypeError, match="does not list"):
        variant("something is wrong")(_SampleUnlisted)
