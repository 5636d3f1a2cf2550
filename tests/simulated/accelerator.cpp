// An accelerator that is not there: devices whose memory lies in the host's RAM.
//
// Torch takes it for a real one: tensors have a device of their own, streams and current
// devices are each thread's, backward passes run in a thread per device, and each device has
// its generator. It is as harsh as CUDA: work waits in its stream until something needs it
// (``streams.h``), memory that may be reused holds poison (``memory.h``), and operators refuse
// tensors that lie elsewhere (``launch.h``). They compute on the host; those that draw random
// numbers, on the device's generator, and they refuse the CPU's, as accelerators do.

#include "launch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_foreach_add_native.h>
#include <ATen/ops/_foreach_copy_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>

namespace simulated {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &memory)

// ---- random numbers --------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = {kType, index};
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
  uint64_t get_offset() const override { return 0; }
};

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto& all = *new auto([] {
    std::array<at::Generator, kDevices> made;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) made[i] = at::make_generator<Generator>(i);
    return made;
  }());
  return all[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard::count; }
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
  bool isPinnedPtr(const void* data) const override { return pinned_block(data) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    const auto device = storage.device().index();
    auto data = new_block(size, device);
    const auto kept = std::min(size, storage.nbytes());
    if (kept) {
      const auto from = *static_cast<BlockPtr*>(storage.data_ptr().get_context());
      const auto to = *static_cast<BlockPtr*>(data.get_context());
      enqueue_with(current_stream(device), {from, to}, [=] {
        std::memcpy(to->data, from->data, kept);
      });
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks& hooks = *new Hooks;
const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- operators -------------------------------------------------------------------------------

using c10::IntArrayRef;
using std::optional;

at::Tensor empty(
    IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  refuse_double(at::dtype_or_default(dtype));
  const c10::DeviceGuard guard({kType, index_of(device.value_or(at::Device(kType)))});
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device> device, optional<bool>) {
  const auto index = index_of(device.value_or(at::Device(kType)));
  return empty_on(index, size, stride, at::dtype_or_default(dtype));
}

const at::Tensor& resize_(
    const at::Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* implementation = self.unsafeGetTensorImpl();
  implementation->set_sizes_contiguous(size);
  if (format) implementation->empty_tensor_restride(*format);
  const auto needed = size_t(self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > self.storage().nbytes()) {
    hooks.resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  const Own own;
  const Lock lock(mutex);
  const auto stream = current_stream(tensor.device().index());
  refuse_in_capture(stream);
  if (counting) {
    synchronize(stream);
  } else {
    drain(stream);
  }
  return on_host(tensor).item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  memory.recordStream(self.storage().data_ptr(), stream);
}

void refuse_elsewhere(const at::Generator& generator) {
  TORCH_CHECK(
      generator.device().type() == kType, "Expected a '", kType,
      "' device type for generator but found '", generator.device().type(), "'");
}

// Numbers are drawn when the work is queued, as on CUDA, and written when the stream comes to it.
template <typename Draw>
at::Tensor& drawn(at::Tensor& self, const optional<at::Generator>& given, Draw draw) {
  const Own own;
  auto mine = given && given->defined() ? *given : default_generator(self.device().index());
  refuse_elsewhere(mine);
  const auto target = on_host(self);
  const auto issue = [=, block = block_of(self)](StreamKey stream) mutable {
    at::Tensor numbers;
    {
      const std::lock_guard<std::mutex> lock(mine.mutex());
      const CleanThread clean;
      auto host = at::detail::createCPUGenerator();
      host.set_state(mine.get_state());
      numbers = at::empty(target.sizes(), target.options());
      draw(numbers, host);
      mine.set_state(host.get_state());
    }
    const Lock lock(mutex);
    enqueue_with(stream, {block}, [target, numbers] { target.copy_(numbers); });
  };
  const auto stream = current_stream(self.device().index());
  {
    const Lock lock(mutex);
    if (auto* graph = graph_of(stream)) return graph->nodes.push_back(issue), self;
  }
  auto now = issue;
  now(stream);
  return self;
}

at::Tensor& uniform_(at::Tensor& self, double from, double to, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.uniform_(from, to, g); });
}
at::Tensor& normal_(at::Tensor& self, double mean, double std, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.normal_(mean, std, g); });
}
at::Tensor& bernoulli_(at::Tensor& self, double p, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.bernoulli_(p, g); });
}
at::Tensor& random_(at::Tensor& self, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.random_(g); });
}
at::Tensor& random_to(at::Tensor& self, int64_t to, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.random_(to, g); });
}
at::Tensor& random_from(
    at::Tensor& self, int64_t from, optional<int64_t> to, optional<at::Generator> generator) {
  return drawn(self, generator, [=](auto t, auto g) { t.random_(from, to, g); });
}
at::Tensor& randperm(int64_t n, optional<at::Generator> generator, at::Tensor& out) {
  out.resize_({n});
  return drawn(out, generator, [=](auto t, auto g) { t.copy_(at::randperm(n, g, t.options())); });
}
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& self, double p, optional<bool>) {
  auto mask = at::empty_like(self).bernoulli_(1 - p);
  return {self * mask / (1 - p), mask.to(at::kBool)};
}

// Other operators that draw do so at once, with a host's generator in the device's state.
void draw_now(const OperatorHandle& op, Stack* stack, size_t argument) {
  auto& given = (*stack)[stack->size() - op.schema().arguments().size() + argument];
  const auto arguments = arguments_of(op, *stack);
  const auto device = *device_of(arguments);
  refuse_mixtures(op, arguments, device);
  auto mine = given.isNone() ? default_generator(device.index()) : given.toGenerator();
  refuse_elsewhere(mine);
  auto host = at::detail::createCPUGenerator();
  {
    const std::lock_guard<std::mutex> lock(mine.mutex());
    const CleanThread clean;
    host.set_state(mine.get_state());
  }
  given = host;
  on_the_host_now(op, stack, device);
  const std::lock_guard<std::mutex> lock(mine.mutex());
  const CleanThread clean;
  mine.set_state(host.get_state());
}

void fallback(const OperatorHandle& op, Stack* stack) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str() == "Generator?") return draw_now(op, stack, i);
  }
  call(op, stack);
}

// Convolutions reach other backends under names of their own.
void convolution(const OperatorHandle&, Stack* stack) {
  call(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}
void convolution_backward(const OperatorHandle&, Stack* stack) {
  const auto channels = (*stack)[stack->size() - 10].toTensor().size(1);
  stack->insert(stack->end() - 7, std::vector<int64_t>{channels});  // the size of a bias
  call(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", ""), stack);
}

// What CUDA has a few kernels for, torch does tensor by tensor here: as if they were these.
void foreach_add(at::TensorList self, at::TensorList other, const at::Scalar& alpha) {
  const Own own;
  at::native::foreach_tensor_add_list_kernel_slow_(self, other, alpha);
}
void foreach_copy(at::TensorList self, at::TensorList source, bool non_blocking) {
  const Own own;
  at::native::foreach_tensor_copy_list_kernel_slow_(self, source, non_blocking);
}

// Under autocast, matrix products in the lower precision; all else as it is.
at::Tensor linear(const at::Tensor& in, const at::Tensor& weight, const optional<at::Tensor>& bias) {
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::AutocastPrivateUse1);
  const auto lower = [](const at::Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(kType), tensor, kType);
  };
  return at::linear(lower(in), lower(weight), bias ? optional(lower(*bias)) : bias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { m.impl("linear", linear); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("is_set_to", at::native::is_set_to);  // the fallback would ask two copies on the host
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
  // their ``out`` is larger on the way, and memory here has one size
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("record_stream", record_stream);
  m.impl("_foreach_add_.List", foreach_add);
  m.impl("_foreach_copy_", foreach_copy);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// ---- what the module torch.simulated is made of ------------------------------------------------

// ---- graphs ----------------------------------------------------------------------------------

auto& graphs = *new std::map<int64_t, std::shared_ptr<Graph>>;

void capture_begin() {
  const Lock lock(mutex);
  const auto stream = current_stream(current_device);
  TORCH_CHECK(stream.second, "a default stream cannot capture");
  capturing[stream] = std::make_shared<Graph>();
}
int64_t capture_end() {
  static int64_t made = 0;
  const Lock lock(mutex);
  const auto graph = capturing.extract(current_stream(current_device)).mapped();
  TORCH_CHECK(!graph->lost, "simulated error: operation failed due to a previous error during capture");
  graphs[++made] = graph;
  return made;
}
void replay(int64_t number, int64_t device) {
  const Own own;
  std::shared_ptr<Graph> graph;
  {
    const Lock lock(mutex);
    graph = graphs.at(number);
    ++counters.kernels;
  }
  const auto stream = current_stream(device);
  for (auto& node : graph->nodes) node(stream);
  const Lock lock(mutex);
  auto& failing = switches.kernels_until_failure[device];
  if (failing && !--failing) {
    enqueue(stream, [=] {
      TORCH_CHECK(false, "simulated error: an illegal memory access was encountered on device ", device);
    });
  }
}
at::Tensor get_rng_state(int64_t index) {
  refuse_in_capture(current_stream(index));
  return default_generator(index).get_state();
}
void set_rng_state(const at::Tensor& state, int64_t index) {
  refuse_in_capture(current_stream(index));
  auto generator = default_generator(index);
  generator.set_state(state);
}
void manual_seed(int64_t seed, int64_t index) {
  auto generator = default_generator(index);
  generator.set_current_seed(seed);
}

void set_order(int64_t order, int64_t seed) {
  const Lock lock(mutex);
  switches.order = Order(order);
  switches.dice.seed(seed);
}
std::vector<int64_t> get_counters() {
  const Lock lock(mutex);
  const auto& c = counters;
  return {c.synchronizations, c.blocking_copies, c.kernels, c.to_device, c.to_host,
          c.between_devices, c.bytes_to_device, c.bytes_to_host, c.bytes_between_devices};
}
int64_t queued() {
  const Lock lock(mutex);
  int64_t all = 0;
  for (const auto& [_, queue] : queues) all += queue.work.size();
  return all;
}

TORCH_LIBRARY(simulated, m) {
  m.def("device_count() -> int", []() -> int64_t { return Guard::count; });
  m.def("set_device_count(int count) -> ()", [](int64_t count) {
    TORCH_CHECK(0 < count && count <= kDevices, "there can be ", int(kDevices), " devices at most");
    Guard::count = count;
  });
  m.def("get_rng_state(int index) -> Tensor", get_rng_state);
  m.def("set_rng_state(Tensor state, int index) -> ()", set_rng_state);
  m.def("manual_seed(int seed, int index) -> ()", manual_seed);
  m.def("capture_begin() -> ()", capture_begin);
  m.def("capture_end() -> int", capture_end);
  m.def("replay(int graph, int device) -> ()", replay);
  m.def("forget_graph(int graph) -> ()", [](int64_t number) {
    std::shared_ptr<Graph> graph;  // what it frees may take its time
    const Lock lock(mutex);
    std::swap(graph, graphs[number]);
    graphs.erase(number);
  });
  m.def("set_order(int order, int seed) -> ()", set_order);
  m.def("set_complete(bool on) -> ()", [](bool on) { switches.complete = on; });
  m.def("set_link(int source, int target, int copy) -> ()", [](int64_t from, int64_t to, int64_t copy) {
    const Lock lock(mutex);
    switches.links[{from, to}] = Copy(copy);
  });
  m.def("set_limit(int index, int bytes) -> ()", [](int64_t index, int64_t bytes) {
    const Lock lock(mutex);
    bytes_of[index].limit = bytes;
  });
  m.def("fail_kernel(int index, int number) -> ()", [](int64_t index, int64_t number) {
    const Lock lock(mutex);
    switches.kernels_until_failure[index] = number;
  });
  m.def("set_lost(int index, bool on) -> ()", [](int64_t index, bool on) {
    const Lock lock(mutex);
    switches.lost[index] = on;
  });
  m.def("counters() -> int[]", get_counters);
  m.def("own_nanoseconds() -> int[]", [] {
    return std::vector<int64_t>{own_nanoseconds, own_nanoseconds_of_all};
  });
  m.def("queued() -> int", queued);
  m.def("set_pace(float link, float memory) -> ()", [](double link, double memory) {
    const Lock lock(mutex);
    switches.link = link;
    switches.memory = memory;
    ++clocks_set;
    for (auto& [_, queue] : queues) {
      queue.clock = 0;
      queue.before_clocks = queue.done;
      queue.clocks.clear();
    }
  });
  m.def("seconds() -> float", [] {
    const Lock lock(mutex);
    double latest = 0;
    for (auto& [key, queue] : queues) {
      drain(key);
      latest = std::max(latest, queue.clock);
    }
    return latest;
  });
}

}  // namespace simulated
