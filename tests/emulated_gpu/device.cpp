// CUDA devices whose memory is the host's and whose kernels are the CPU's, for a torch that was built without CUDA.
//
// Tensors on them are CUDA tensors to all of torch: what mixes them with the host's raises, they have generators,
// streams and limits of memory of their own, and backward passes run in threads of their own. Streams do nothing:
// everything is done at once, so what waits too little is not seen.
//
// How a device comes to torch: https://docs.pytorch.org/tutorials/advanced/privateuseone.html.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::DispatchKeySet;

constexpr int MOST_DEVICES = 16;
DeviceIndex device_count = 1;
thread_local DeviceIndex current = 0;

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current; }

// ---- memory

struct Use {
  std::atomic<int64_t> now{0}, most{0}, limit{std::numeric_limits<int64_t>::max()};
};
Use uses[MOST_DEVICES];

void require_room(DeviceIndex device, int64_t bytes) {
  auto& use = uses[device];
  if (use.now + bytes > use.limit)
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", int(device),
        " has a total capacity of ", use.limit.load(), " bytes.");
}

struct Allocation {
  DeviceIndex device;
  int64_t bytes;
  c10::Storage host;
  ~Allocation() { uses[device].now -= bytes; }
};

// The host's storage as memory of a device.
c10::DataPtr on_device(c10::Storage host, DeviceIndex device) {
  const auto bytes = static_cast<int64_t>(host.nbytes());
  require_room(device, bytes);
  const int64_t now = uses[device].now += bytes;
  auto most = uses[device].most.load();
  while (most < now && !uses[device].most.compare_exchange_weak(most, now)) {
  }
  void* data = host.mutable_data();
  auto* allocation = new Allocation{device, bytes, std::move(host)};
  return {
      data, allocation, [](void* it) { delete static_cast<Allocation*>(it); }, Device(DeviceType::CUDA, device)};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    require_room(current, static_cast<int64_t>(bytes));
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes) memset(data.get(), 0xff, bytes);  // NaN: whoever reads what was never written sees it
    c10::Storage host(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), false);
    return on_device(std::move(host), current);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { memcpy(dest, src, count); }
};
DeviceAllocator device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> guard(pinned_lock);
    if (data) pinned[static_cast<const char*>(data)] = bytes;
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.erase(static_cast<const char*>(data));
    }
    c10::free_cpu(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t count) const override { memcpy(dest, src, count); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(data) < after->first + after->second;
}

// ---- random numbers

struct EmulatedGenerator final : c10::GeneratorImpl {
  at::Generator host;
  explicit EmulatedGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::CUDA, device), DispatchKeySet(DispatchKey::CUDA)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  EmulatedGenerator* clone_impl() const override {
    auto* other = new EmulatedGenerator(device().index());
    other->host = host.clone();
    return other;
  }
};

const at::Generator& default_generator(DeviceIndex device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MOST_DEVICES; i++) made.push_back(at::make_generator<EmulatedGenerator>(i));
    return made;
  }();
  return all.at(device < 0 ? current : device);
}

at::Generator host_of(const at::Generator& generator) {
  return static_cast<EmulatedGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

// While it lives, what draws from the host's default generator draws from that of a device.
struct DrawnOnDevice {
  at::Generator host = at::detail::getDefaultCPUGenerator();
  at::Generator device;
  at::Tensor before = at::Tensor::wrap_tensor_impl(host.unsafeGetGeneratorImpl()->get_state());
  explicit DrawnOnDevice(DeviceIndex index) : device(host_of(default_generator(index))) { copy(device, host); }
  ~DrawnOnDevice() {
    copy(host, device);
    host.unsafeGetGeneratorImpl()->set_state(*before.unsafeGetTensorImpl());
  }
  static void copy(at::Generator& from, at::Generator& to) {
    to.unsafeGetGeneratorImpl()->set_state(*from.unsafeGetGeneratorImpl()->get_state());
  }
};
bool give_default_generator = false;

// ---- devices and streams

thread_local std::map<DeviceIndex, c10::StreamId> current_streams;
std::atomic<c10::StreamId> next_stream{1};

c10::Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {DeviceType::CUDA, device}, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::CUDA;
  DeviceType type() const override { return static_type; }
  Device getDevice() const override { return {static_type, current}; }
  Device exchangeDevice(Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  c10::Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int = 0) const override {
    return stream_of(index_of(device), next_stream++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    if (give_default_generator) return default_generator(device);
    return at::make_generator<EmulatedGenerator>(device < 0 ? current : device);
  }
  Device getDeviceFromPtr(void*) const override { return {DeviceType::CUDA, current}; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device < 0 ? current : device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(DeviceIndex) const override {}
};

} // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
} // namespace at

namespace c10d {
struct EmulatedTimer : Timer {
  explicit EmulatedTimer(Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, EmulatedTimer)
} // namespace c10d

#include "operators.inc"

// ---- for Python: torch.cuda's functions

extern "C" {
void emulated_set_device_count(int count) { device_count = static_cast<DeviceIndex>(count); }
int emulated_current_device() { return current; }
void emulated_set_device(int device) { current = static_cast<DeviceIndex>(device); }
int64_t emulated_allocated(int device) { return uses[device].now; }
int64_t emulated_most_allocated(int device) { return uses[device].most; }
void emulated_forget_most(int device) { uses[device].most = uses[device].now.load(); }
void emulated_set_limit(int device, int64_t bytes) { uses[device].limit = bytes; }
void emulated_give_default_generator(int yes) { give_default_generator = yes; }
int64_t emulated_pinned_bytes() {
  std::lock_guard<std::mutex> guard(pinned_lock);
  int64_t all = 0;
  for (auto& each : pinned) all += each.second;
  return all;
}
void emulated_resize(void* storage_impl, int64_t bytes) {
  auto* storage = static_cast<c10::StorageImpl*>(storage_impl);
  auto made = device_allocator.allocate(bytes);
  memcpy(made.get(), storage->data(), std::min<size_t>(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(made));
  storage->set_nbytes(bytes);
}
}
