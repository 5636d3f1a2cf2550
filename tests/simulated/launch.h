// Copies and operators: what is queued, where, and what the host waits for.

#pragma once

#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <set>
#include <sstream>

namespace simulated {

inline Memory memory;
inline Pinned pinned_memory;
inline thread_local bool counting = true;  // not while an operator runs as a whole on the host

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kType; }

inline void refuse_double(at::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      switches.complete || dtype != at::kDouble, "this simulated accelerator has no float64");
}

inline at::Tensor empty_on(
    c10::DeviceIndex device, c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype) {
  refuse_double(dtype);
  const c10::DeviceGuard guard({kType, device});
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, dtype);
}

// The same memory as a tensor of the host's, which keeps it mapped.
inline at::Tensor on_host(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const CleanThread clean;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept = block_of(tensor)](void*) {},
      tensor.options().device(at::kCPU));
}

// ---- copies ----------------------------------------------------------------------------------

// Nobody may look at the target of a copy under way.
inline void poison(const at::Tensor& target, const BlockPtr& block) {
  if (!block || block->used()) return;  // queued work still needs it
  if (target.is_non_overlapping_and_dense() && target.numel()) {
    std::memset(target.data_ptr(), kPoison, target.nbytes());
  }
}

inline void altered(const at::Tensor& target, Copy link) {
  if (link != Copy::altered || !target.numel()) return;
  auto damaged = target.contiguous().clone();
  auto* bytes = static_cast<uint8_t*>(damaged.data_ptr());
  for (size_t i = 0; i < damaged.nbytes(); i += 64) bytes[i] ^= 0x10;
  target.copy_(damaged);
}

inline void between_devices(const at::Tensor& source, const at::Tensor& target) {
  const auto from = source.device().index(), to = target.device().index();
  const auto sending = current_stream(from), receiving = current_stream(to);
  if (counting) ++counters.between_devices, counters.bytes_between_devices += source.nbytes();
  const auto link = switches.links.count({from, to}) ? switches.links[{from, to}] : Copy::whole;
  wait_for(sending, receiving);  // both as CUDA does it: the copy is the sender's work
  poison(target, block_of(target));
  enqueue_with(
      sending, {block_of(source), block_of(target)},
      [target = on_host(target), source = on_host(source), link] {
        if (link != Copy::dropped) target.copy_(source);
        altered(target, link);
      },
      seconds_for(source.nbytes(), switches.link));
  wait_for(receiving, sending);
}

inline void wait_for_copy(StreamKey stream) {
  refuse_in_capture(stream);
  if (!counting) return drain(stream);
  ++counters.blocking_copies;
  synchronize(stream);
}

inline void to_device(at::Tensor source, const at::Tensor& target, bool non_blocking) {
  const auto stream = current_stream(target.device().index());
  if (!non_blocking || !pinned_block(source.data_ptr())) refuse_in_capture(stream);
  if (counting) ++counters.to_device, counters.bytes_to_device += source.nbytes();
  const bool plain = source.is_contiguous() && source.dtype() == target.dtype();
  auto block = plain ? pinned_block(source.data_ptr()) : nullptr;
  if (!block) source = source.clone();  // pageable memory is staged: the caller may write it
  poison(target, block_of(target));
  std::vector<BlockPtr> blocks{block_of(target)};
  if (block) blocks.push_back(block);
  enqueue_with(
      stream, blocks, [target = on_host(target), source] { target.copy_(source); },
      seconds_for(source.nbytes(), switches.link));
  if (!block && switches.link) {  // on CUDA, too, the host is busy with it until it is through
    drain(stream);
    host_clock() = std::max(host_clock(), queues[stream].clock);
  }
  if (!non_blocking) wait_for_copy(stream);
}

inline void to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto stream = current_stream(source.device().index());
  if (counting) ++counters.to_host, counters.bytes_to_host += source.nbytes();
  const bool plain = target.is_contiguous() && source.dtype() == target.dtype();
  const auto block = plain ? pinned_block(target.data_ptr()) : nullptr;
  poison(target, block);
  std::vector<BlockPtr> blocks{block_of(source)};
  if (block) blocks.push_back(block);
  enqueue_with(
      stream, blocks, [target, source = on_host(source)] { target.copy_(source); },
      seconds_for(source.nbytes(), switches.link));
  if (!non_blocking || !block) wait_for_copy(stream);
}

inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const Own own;
  const Lock lock(mutex);
  if (!target.numel()) return target;
  if (!on_device(source)) {
    to_device(source, target, non_blocking);
  } else if (!on_device(target)) {
    to_host(source, target, non_blocking);
  } else if (source.device() != target.device()) {
    between_devices(source, target);
  } else {
    enqueue_with(
        current_stream(target.device().index()), {block_of(source), block_of(target)},
        [target = on_host(target), source = on_host(source)] { target.copy_(source); },
        seconds_for(2 * source.nbytes(), switches.memory));
  }
  return target;
}

// ---- operators -------------------------------------------------------------------------------

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// ``value`` with every tensor in it exchanged.
template <typename Exchange>
IValue exchanged(const IValue& value, const Exchange& exchange) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(exchange(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& tensor : value.toTensorVector()) {
      made.push_back(tensor.defined() ? exchange(tensor) : tensor);
    }
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
      made.push_back(tensor && tensor->defined() ? std::optional(exchange(*tensor)) : tensor);
    }
    return made;
  }
  return value;
}

template <typename Visit>
void visit(const IValue& value, const Visit& each) {
  exchanged(value, [&](const Tensor& tensor) { each(tensor); return tensor; });
}

inline Stack arguments_of(const OperatorHandle& op, const Stack& stack) {
  return Stack(stack.end() - op.schema().arguments().size(), stack.end());
}

// That of the first tensor which is on one.
inline std::optional<c10::Device> device_of(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    visit(argument, [&](const Tensor& tensor) {
      if (!device && on_device(tensor)) device = tensor.device();
    });
  }
  return device;
}

// CUDA's operators refuse what lies elsewhere, but for scalars, and indices, which they fetch.
inline void refuse_mixtures(const OperatorHandle& op, const Stack& arguments, c10::Device device) {
  static const std::set<std::string> lenient{
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
      "aten::_pack_padded_sequence"};
  if (lenient.count(op.schema().name())) return;
  for (const auto& argument : arguments) {
    visit(argument, [&](const Tensor& tensor) {
      const bool fine = tensor.device() == device || (tensor.is_cpu() && !tensor.dim());
      TORCH_CHECK(
          fine, "Expected all tensors to be on the same device, but found at least two devices, ",
          device, " and ", tensor.device(), "! (when checking arguments of ", op.schema().name(), ")");
    });
  }
}

// One call of an operator, whose results are known by their shapes before it runs.
class Launch {
 public:
  Launch(const OperatorHandle& op, Stack arguments, c10::Device device)
      : op_(op), arguments_(std::move(arguments)), device_(device) {}

  // Whether the shapes could be told; else nothing has happened.
  bool predict() {
    const auto key = signature();
    {
      const Lock lock(mutex);
      const auto known = predictions().find(key);
      if (known != predictions().end()) prediction_ = known->second;
    }
    if (!prediction_) {
      prediction_ = std::make_shared<const Prediction>(predicted());
      const Lock lock(mutex);
      predictions()[key] = prediction_;
    }
    return prediction_->possible;
  }

  // The results, to be filled when the stream comes to it.
  Stack enqueue() {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto sizes = prediction_->shapes[i].sizes();
      if (tensors_[i].sizes() != sizes) tensors_[i].resize_(sizes);  // an ``out``
    }
    Stack results;
    bool fresh = false;
    const auto& schema = op_.schema();
    for (size_t i = 0; i < prediction_->results.size(); ++i) {
      const auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->isWrite()) {
        results.push_back(arguments_[written(*alias)]);
      } else {
        fresh |= !alias;
        results.push_back(exchanged(prediction_->results[i], [&](const Tensor& shape) {
          return alias ? view_of(*alias, shape) : made(shape);
        }));
      }
    }
    const bool is_view = !fresh && !schema.is_mutable();
    if (!is_view) queue_it(results);
    return results;
  }

 private:
  struct Prediction {
    bool possible = false;
    Stack results;
    std::vector<Tensor> shapes;  // of the arguments: an ``out`` may get another
  };

  // Torch tells shapes in Python, which takes its time.
  static std::map<std::string, std::shared_ptr<const Prediction>>& predictions() {
    static auto& all = *new std::map<std::string, std::shared_ptr<const Prediction>>;
    return all;
  }

  // All that shapes depend on; also numbers the tensors.
  std::string signature() {
    std::ostringstream key;
    key << op_.operator_name();
    for (const auto& argument : arguments_) {
      bool tensors = argument.isOptionalTensorList() || argument.isTensorList();
      visit(argument, [&](const Tensor& tensor) {
        tensors = true;
        key << '|' << int(tensor.scalar_type()) << tensor.sizes() << tensor.strides();
        key << tensor.unsafeGetTensorImpl()->is_wrapped_number();
        if (on_device(tensor)) key << '#' << number(tensor);
      });
      if (!tensors) key << '|' << argument;
      key << ';';
    }
    return key.str();
  }

  size_t number(const Tensor& tensor) {
    const auto found = std::find_if(
        tensors_.begin(), tensors_.end(), [&](const auto& other) { return other.is_same(tensor); });
    const size_t position = found - tensors_.begin();
    if (found == tensors_.end()) tensors_.push_back(tensor);
    return position;
  }

  Prediction predicted() {
    Prediction made;
    for (const auto& result : op_.schema().returns()) {
      const auto kind = result.type()->str();
      if (kind != "Tensor" && kind != "Tensor[]") return made;
    }
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return made;
    const CleanThread clean;
    for (const auto& tensor : tensors_) {
      const auto options = tensor.options().device(at::kMeta);
      made.shapes.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), options));
    }
    for (const auto& argument : arguments_) {
      made.results.push_back(exchanged(argument, [&](const Tensor& tensor) {
        return on_device(tensor) ? made.shapes[number(tensor)] : tensor;
      }));
    }
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &made.results);
      made.possible = true;
    } catch (const std::exception&) {
      // It depends on values, or it is wrong, which the operator itself will say.
    }
    return made;
  }

  size_t written(const c10::AliasInfo& alias) const {
    const auto& all = op_.schema().arguments();
    for (size_t i = 0; i < all.size(); ++i) {
      const auto* other = all[i].alias_info();
      if (other && other->beforeSets() == alias.beforeSets()) return i;
    }
    TORCH_CHECK(false, op_.schema(), " is not simulated");
  }

  Tensor made(const Tensor& shape) const {
    return empty_on(device_.index(), shape.sizes(), shape.strides(), shape.scalar_type());
  }

  Tensor view_of(const c10::AliasInfo& alias, const Tensor& shape) const {
    const Tensor& base = arguments_[written(alias)].toTensor();
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
    auto* implementation = view.unsafeGetTensorImpl();
    const auto offset = base.storage_offset() * base.itemsize() / shape.itemsize();
    implementation->set_sizes_and_strides(shape.sizes(), shape.strides(), offset + shape.storage_offset());
    return view;
  }

  void queue_it(const Stack& results) const {
    std::vector<BlockPtr> blocks;
    double bytes = 0;  // read and written
    const auto lent = [&](const Tensor& tensor) {
      bytes += tensor.nbytes();
      if (!on_device(tensor)) return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
      if (auto block = block_of(tensor)) blocks.push_back(std::move(block));
      return on_host(tensor);
    };
    Stack inputs, outputs;
    for (const auto& argument : arguments_) inputs.push_back(exchanged(argument, lent));
    for (const auto& result : results) outputs.push_back(exchanged(result, lent));
    const auto work = [op = op_, inputs = std::move(inputs), outputs = std::move(outputs)] {
      Stack stack = inputs;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (!op.schema().returns()[i].alias_info()) store(outputs[i], stack[i]);
      }
    };
    const Lock lock(mutex);
    ++counters.kernels;
    auto& failing = switches.kernels_until_failure[device_.index()];
    if (failing && !--failing) {
      enqueue_with(current_stream(device_.index()), blocks, [index = int(device_.index())] {
        TORCH_CHECK(false, "simulated error: an illegal memory access was encountered on device ", index);
      });
    } else {
      enqueue_with(
          current_stream(device_.index()), blocks, work, seconds_for(bytes, switches.memory));
    }
  }

  static void store(const IValue& target, const IValue& value) {
    if (target.isTensorList()) {
      const auto targets = target.toTensorVector(), values = value.toTensorVector();
      for (size_t i = 0; i < targets.size(); ++i) targets[i].copy_(values[i]);
    } else if (target.toTensor().defined() && value.toTensor().defined()) {
      // What nobody needs is empty on the CPU: batch normalisation's statistics where it is at rest.
      if (value.toTensor().numel()) target.toTensor().copy_(value.toTensor());
    }
  }

  const OperatorHandle op_;
  Stack arguments_;
  const c10::Device device_;
  std::vector<Tensor> tensors_;  // of the device, each once
  std::shared_ptr<const Prediction> prediction_;
};

// At once, and whole: what is no operator of torch's own, or has results that depend on values.
inline void on_the_host_now(const OperatorHandle& op, Stack* stack, std::optional<c10::Device> device) {
  struct Uncounted {
    bool before = std::exchange(counting, false);
    ~Uncounted() { counting = before; }
  };
  if (device) {
    Guard().synchronizeStream(Guard().getStream(*device));
  }
  const Uncounted uncounted;
  at::native::cpu_fallback(op, stack);
}

inline void call(const OperatorHandle& op, Stack* stack) {
  const Own own;
  auto arguments = arguments_of(op, *stack);
  const auto device = device_of(arguments);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !device || switches.complete || op.schema().name() != "aten::segment_reduce",
      op.schema().name(), " is not on this simulated accelerator");
  if (device) refuse_mixtures(op, arguments, *device);
  if (device && op.schema().name().starts_with("aten::")) {
    Launch launch(op, arguments, *device);
    if (launch.predict()) {
      auto results = launch.enqueue();
      torch::jit::drop(*stack, arguments.size());
      for (auto& result : results) stack->push_back(std::move(result));
      return;
    }
  }
  on_the_host_now(op, stack, device);
}

}  // namespace simulated
