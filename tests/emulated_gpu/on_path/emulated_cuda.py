"""``torch.cuda`` of the devices that device.cpp emulates."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

Library = Any


def load_devices(torch_folder: Path) -> Library:
    """Make the devices known to torch before it is imported: it looks once only."""
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(os.environ["CUDA_EMULATED_LIBRARY"], mode=ctypes.RTLD_GLOBAL)
    library.emulated_allocated.restype = ctypes.c_int64
    library.emulated_most_allocated.restype = ctypes.c_int64
    library.emulated_pinned_bytes.restype = ctypes.c_int64
    library.emulated_set_limit.argtypes = [ctypes.c_int, ctypes.c_int64]
    library.emulated_resize.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    return library


def install(library: Library) -> None:
    """Put the functions in their places."""
    import torch
    import torch.distributed as distributed
    from torch.distributed import distributed_c10d

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = pynvml.COUNT if visible is None else len([name for name in visible.split(",") if name])
    library.emulated_set_device_count(count)
    devices = _Devices(torch, library, count)
    for part in (_Memory, _Randomness, _Streams):
        part.add(torch.cuda, devices)
    devices.add(torch.cuda)
    _add_storages(torch, library)
    torch.backends.cuda.is_built = lambda: True
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch._C._accelerator_getAllocatorSettings = lambda: "expandable_segments:True"
    begin_group = distributed.init_process_group

    def init_process_group(backend: str | None = None, **settings: Any) -> None:
        begin_group("cpu:gloo,cuda:gloo" if backend and "nccl" in backend else backend, **settings)

    distributed.is_nccl_available = lambda: True
    distributed.init_process_group = distributed_c10d.init_process_group = init_process_group


class _Devices:
    """Which there are, and which is the current one of this thread."""

    def __init__(self, torch: Any, library: Library, count: int) -> None:
        self.torch, self.library, self.count = torch, library, count
        self.initialized = False

    def index(self, device: Any = None) -> int:
        """The number of ``device`` as torch.cuda's functions take it."""
        if isinstance(device, int):
            return device
        if device is None or (device := self.torch.device(device)).index is None:
            return int(self.library.emulated_current_device())
        return int(device.index)

    def initialize(self) -> None:
        if self.initialized:
            return
        self.initialized = True
        cuda = self.torch.cuda
        cuda.default_generators = tuple(cuda.default_generator_of(i) for i in range(self.count))
        while cuda._queued_calls:
            cuda._queued_calls.pop(0)[0]()

    def select(self, device: Any) -> None:
        self.initialize()
        index = self.index(device)
        if index >= self.count:
            raise self.torch.AcceleratorError("CUDA error: invalid device ordinal")
        if index >= 0:
            self.library.emulated_set_device(index)

    def properties(self, device: Any = None) -> SimpleNamespace:
        uuid = pynvml.nvmlDeviceGetUUID(self.index(device)).removeprefix("GPU-")
        return SimpleNamespace(
            name="Emulated", total_memory=pynvml.BYTES, uuid=uuid, multi_processor_count=1, major=8, minor=0
        )

    def add(self, cuda: Any) -> None:
        devices = self

        class DeviceOf:
            def __init__(self, device: Any) -> None:
                self._index = devices.index(device)

            def __enter__(self) -> None:
                self._before = devices.index()
                devices.select(self._index)

            def __exit__(self, *raised: object) -> None:
                devices.select(self._before)

        def current_device() -> int:
            devices.initialize()
            return devices.index()

        cuda._queued_calls.clear()
        cuda._is_compiled = cuda.is_available = lambda: self.count > 0
        cuda._is_in_bad_fork = cuda.random._is_in_bad_fork = lambda: False
        cuda._lazy_init = cuda.init = self.initialize
        cuda.is_initialized = lambda: self.initialized
        cuda.device_count = lambda: self.count
        cuda.current_device = current_device
        cuda.set_device = self.select
        cuda.device = DeviceOf
        cuda.get_device_properties = self.properties
        cuda.get_device_name = lambda device=None: "Emulated"
        cuda.get_device_capability = lambda device=None: (8, 0)
        cuda.is_bf16_supported = lambda including_emulation=True: True


class _Memory:
    @staticmethod
    def add(cuda: Any, devices: _Devices) -> None:
        library, index = devices.library, devices.index
        fractions = dict.fromkeys(range(devices.count), 1.0)

        def allocated(device: Any = None) -> int:
            return int(library.emulated_allocated(index(device)))

        def most_allocated(device: Any = None) -> int:
            return int(library.emulated_most_allocated(index(device)))

        def set_fraction(fraction: float, device: Any = None) -> None:
            fractions[index(device)] = fraction
            library.emulated_set_limit(index(device), int(fraction * pynvml.BYTES))

        def statistics(device: Any = None) -> dict[str, int]:
            return {
                "allocated_bytes.all.current": allocated(device),
                "allocated_bytes.all.peak": most_allocated(device),
            }

        for number in fractions:
            set_fraction(1.0, number)
        cuda.memory_allocated = cuda.memory_reserved = allocated
        cuda.max_memory_allocated = cuda.max_memory_reserved = most_allocated
        cuda.reset_peak_memory_stats = lambda device=None: library.emulated_forget_most(index(device))
        cuda.mem_get_info = lambda device=None: (pynvml.BYTES - allocated(device), pynvml.BYTES)
        cuda.memory_stats = statistics
        cuda.get_per_process_memory_fraction = lambda device=None: fractions[index(device)]
        cuda.set_per_process_memory_fraction = set_fraction
        cuda.host_memory_stats = lambda: dict.fromkeys(
            ("allocated_bytes.current", "allocated_bytes.peak"), library.emulated_pinned_bytes()
        )
        cuda.reset_peak_host_memory_stats = cuda.empty_cache = cuda.ipc_collect = lambda: None


class _Randomness:
    @staticmethod
    def add(cuda: Any, devices: _Devices) -> None:
        torch, library = devices.torch, devices.library

        def default_generator_of(device: Any = None) -> Any:
            library.emulated_give_default_generator(1)
            try:
                return torch.Generator(torch.device("cuda", devices.index(device)))
            finally:
                library.emulated_give_default_generator(0)

        def seed_all(seed: int) -> None:
            for number in range(devices.count):
                default_generator_of(number).manual_seed(int(seed))

        def seed_all_now_or_later(seed: int) -> None:
            if devices.initialized:
                seed_all(seed)
            else:
                cuda._queued_calls.append((lambda: seed_all(seed), None))

        def get_state(device: Any = "cuda") -> Any:
            return default_generator_of(device).get_state()

        def set_state(state: Any, device: Any = "cuda") -> None:
            default_generator_of(device).set_state(state)

        def set_states(states: Any) -> None:
            for number, state in enumerate(states):
                set_state(state, number)

        cuda.default_generator_of = default_generator_of
        for module in (cuda, cuda.random):
            module.manual_seed_all = seed_all_now_or_later
            module.manual_seed = lambda seed: default_generator_of().manual_seed(int(seed))
            module.get_rng_state, module.set_rng_state = get_state, set_state
            module.get_rng_state_all = lambda: [get_state(number) for number in range(devices.count)]
            module.set_rng_state_all = set_states


class Event:
    """Nothing ever has to be awaited."""

    def __init__(self, *asked: object, **settings: object) -> None:
        pass

    def nothing(self, *given: object) -> None:
        pass

    record = wait = synchronize = nothing
    query = staticmethod(lambda: True)


class _Streams:
    """Streams and events of which nothing has to be awaited."""

    @staticmethod
    def add(cuda: Any, devices: _Devices) -> None:
        torch, index = devices.torch, devices.index
        of_threads = threading.local()

        class Stream(torch.Stream):  # type: ignore[misc]
            def __new__(cls, device: Any = None, priority: int = 0, **settings: Any) -> Any:
                return torch.Stream.__new__(cls, torch.device("cuda", index(device)))

            def __init__(self, *asked: object, **settings: object) -> None:
                pass

            def nothing(self, *given: object) -> None:
                pass

            def record_event(self, event: Any = None) -> Any:
                return event or Event()

            wait_event = wait_stream = synchronize = nothing

        def streams() -> dict[int, Any]:
            if not hasattr(of_threads, "streams"):
                of_threads.streams = {}
            return of_threads.streams  # type: ignore[no-any-return]

        def current_stream(device: Any = None) -> Any:
            number = index(device)
            return streams().get(number) or default_stream(number)

        defaults: dict[int, Any] = {}

        def default_stream(device: Any = None) -> Any:
            return defaults.setdefault(index(device), Stream(device))

        def set_stream(stream: Any) -> None:
            streams()[stream.device.index] = stream

        @contextmanager
        def within(stream: Any) -> Iterator[None]:
            if stream is None:
                yield
                return
            before = current_stream(stream.device)
            set_stream(stream)
            try:
                yield
            finally:
                set_stream(before)

        cuda.Stream = cuda.streams.Stream = Stream
        cuda.Event = cuda.streams.Event = Event
        cuda.current_stream, cuda.default_stream = current_stream, default_stream
        cuda.set_stream, cuda.stream = set_stream, within
        cuda.synchronize = lambda device=None: None
        cuda.is_current_stream_capturing = lambda: False
        cuda.set_sync_debug_mode = lambda mode: None


def _add_storages(torch: Any, library: Library) -> None:
    """What a torch without CUDA can't do with a device's storages: resize, copy and move them."""
    base = torch.storage._StorageBase
    resize: Callable[..., Any] = torch.UntypedStorage.resize_
    clone: Callable[..., Any] = base.clone
    move: Callable[..., Any] = torch.storage._to

    def copied(storage: Any, device: Any) -> Any:
        made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        return made.untyped_storage().copy_(storage)

    def resized(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        library.emulated_resize(self._cdata, size)
        return self

    def moved(self: Any, device: Any, non_blocking: bool = False) -> Any:
        if "cuda" in (self.device.type, device.type) and self.device != device:
            return copied(self, device)
        return move(self, device, non_blocking)

    torch.UntypedStorage.resize_ = resized
    base.clone = lambda self: copied(self, self.device) if self.device.type == "cuda" else clone(self)
    torch.storage._to = moved
