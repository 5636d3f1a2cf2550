// An accelerator that is not there: four devices whose memory lies in the host's RAM.
//
// Torch takes it for a real one: tensors have a device of their own, streams and current
// devices are each thread's, backward passes run in a thread per device, and each device has
// its generator. Operators run on the host; those that draw random numbers, on the device's
// generator, and they refuse the CPU's, as accelerators do.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 4;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::atomic<c10::StreamId> streams_made{0};

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}

// ---- devices and streams -----------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", int(kDevices), " devices");
    if (device.has_index()) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(device, ++streams_made);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++streams_made);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    *event = this_event();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

 private:
  static void* this_event() {
    static int event = 0;
    return &event;
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, index_of(device)}, id);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- memory ------------------------------------------------------------------------------

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size ? std::malloc(size) : nullptr;
    return {data, data, &std::free, {kType, current_device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// ---- random numbers ----------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = {kType, index};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  uint64_t get_offset() const override { return 0; }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto all = [] {
    std::array<at::Generator, kDevices> made;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) made[i] = at::make_generator<Generator>(i);
    return made;
  }();
  return all[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return maybeExchangeDevice(index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    const auto before = current_device;
    if (index >= 0) current_device = index;
    return before;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    if (storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---- operators ---------------------------------------------------------------------------

using c10::IntArrayRef;
using std::optional;

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {},
      tensor.options().device(at::kCPU));
}

at::Tensor empty(
    IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard({kType, index_of(device.value_or(at::Device(kType)))});
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>) {
  const c10::DeviceGuard guard({kType, index_of(device.value_or(at::Device(kType)))});
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, at::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

template <typename Draw>
void with_host_generator(const at::Tensor& self, const optional<at::Generator>& given, Draw draw) {
  auto mine = given && given->defined() ? *given : default_generator(self.device().index());
  TORCH_CHECK(
      mine.device().type() == kType, "Expected a '", kType,
      "' device type for generator but found '", mine.device().type(), "'");
  const std::lock_guard<std::mutex> lock(mine.mutex());
  auto host = at::detail::createCPUGenerator();
  host.set_state(mine.get_state());
  draw(on_host(self), host);
  mine.set_state(host.get_state());
}

at::Tensor& uniform_(at::Tensor& self, double from, double to, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.uniform_(from, to, g); });
  return self;
}
at::Tensor& normal_(at::Tensor& self, double mean, double std, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.normal_(mean, std, g); });
  return self;
}
at::Tensor& bernoulli_(at::Tensor& self, double p, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.bernoulli_(p, g); });
  return self;
}
at::Tensor& random_(at::Tensor& self, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.random_(g); });
  return self;
}
at::Tensor& random_to(at::Tensor& self, int64_t to, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.random_(to, g); });
  return self;
}
at::Tensor& random_from(
    at::Tensor& self, int64_t from, optional<int64_t> to, optional<at::Generator> generator) {
  with_host_generator(self, generator, [&](auto t, auto g) { t.random_(from, to, g); });
  return self;
}
at::Tensor& randperm(int64_t n, optional<at::Generator> generator, at::Tensor& out) {
  out.resize_({n});
  with_host_generator(out, generator, [&](auto t, auto g) {
    t.copy_(at::randperm(n, g, t.options()));
  });
  return out;
}
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& self, double p, optional<bool>) {
  auto mask = at::empty_like(self).bernoulli_(1 - p);
  return {self * mask / (1 - p), mask.to(at::kBool)};
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const auto& argument : op.schema().arguments()) {
    TORCH_CHECK(
        argument.type()->str() != "Generator?", op.schema().name(), " is not simulated: it draws");
  }
  at::native::cpu_fallback(op, stack);
}

// What the module torch.simulated is made of.
at::Tensor get_rng_state(int64_t index) { return default_generator(index).get_state(); }
void set_rng_state(const at::Tensor& state, int64_t index) {
  auto generator = default_generator(index);
  generator.set_state(state);
}
void manual_seed(int64_t seed, int64_t index) {
  auto generator = default_generator(index);
  generator.set_current_seed(seed);
}
TORCH_LIBRARY(simulated, m) {
  m.def("device_count() -> int", []() -> int64_t { return kDevices; });
  m.def("get_rng_state(int index) -> Tensor", get_rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", set_rng_state);
  m.def("manual_seed(int seed, int index) -> ()", manual_seed);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

// Under autocast, matrix products in the lower precision; all else as it is.
at::Tensor linear(const at::Tensor& in, const at::Tensor& weight, const optional<at::Tensor>& bias) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto lower = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kType), tensor, kType);
  };
  return at::linear(lower(in), lower(weight), bias ? optional(lower(*bias)) : bias);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { m.impl("linear", linear); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", at::native::resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("uniform_", uniform_);
  m.impl("normal_", normal_);
  m.impl("bernoulli_.float", bernoulli_);
  m.impl("random_", random_);
  m.impl("random_.to", random_to);
  m.impl("random_.from", random_from);
  m.impl("randperm.generator_out", randperm);
  m.impl("native_dropout", native_dropout);
}

}  // namespace
