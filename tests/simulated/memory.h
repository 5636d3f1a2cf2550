// Memory of the devices, pinned memory of the host, and what each device holds of it.

#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

namespace simulated {

constexpr int kPoison = 0xFF;  // NaN in every floating-point dtype, -1 in every integer one

inline void give_back(c10::DeviceIndex device, size_t size);

// A piece of memory. Work that waits in a queue keeps it mapped, as a card's memory is, even
// after the tensor is gone; but then it holds poison as soon as its own stream may reuse it.
struct Block {
  void* data;
  size_t size;
  c10::DeviceIndex device;             // kHost: pinned
  StreamKey home;                      // the stream that was current when it was allocated
  std::vector<StreamKey> recorded;     // by ``record_stream``
  std::map<StreamKey, int> uses;       // how much of the queued work needs it, by stream
  bool of_graph = false;               // allocated in a capture: it stays as long as the graph

  ~Block() {
    if (of_graph) give_back(device, size);
    std::free(data);
  }
  bool used_elsewhere() const {
    return std::any_of(uses.begin(), uses.end(), [&](const auto& use) {
      return use.second && use.first != home &&
          std::find(recorded.begin(), recorded.end(), use.first) == recorded.end();
    });
  }
  bool used() const {
    return std::any_of(uses.begin(), uses.end(), [](const auto& use) { return use.second; });
  }
};
using BlockPtr = std::shared_ptr<Block>;

struct Bytes {
  int64_t live = 0, peak = 0, limit = std::numeric_limits<int64_t>::max();
};
inline auto& bytes_of = *new std::array<Bytes, kDevices>;
inline void give_back(c10::DeviceIndex device, size_t size) {
  const Lock lock(mutex);
  bytes_of[device].live -= size;
}
inline auto& pinned = *new std::map<uintptr_t, std::weak_ptr<Block>>;  // by its last byte

inline void forget(void* context) {
  const Own own;
  auto* holder = static_cast<BlockPtr*>(context);
  {
    const Lock lock(mutex);
    auto& block = **holder;
    if (block.device == kHost) {
      pinned.erase(uintptr_t(block.data) + block.size - 1);  // its reuse waits for queued work
    } else {
      if (!block.of_graph) give_back(block.device, block.size);
      if (block.used_elsewhere()) {
        for (const auto& stream : block.recorded) wait_for(block.home, stream);
        enqueue(block.home, [kept = *holder] { std::memset(kept->data, kPoison, kept->size); });
        drain(block.home);  // the next tensor on that stream may be written at once
      }
    }
  }
  delete holder;
}

inline c10::DataPtr new_block(size_t size, c10::DeviceIndex device) {
  const c10::Device place =
      device == kHost ? c10::Device(c10::kCPU) : c10::Device(kType, device);
  if (!size) return {nullptr, nullptr, &forget_nothing, place};
  const Own own;
  const Lock lock(mutex);
  if (device != kHost) {
    auto& bytes = bytes_of[device];
    TORCH_CHECK_WITH(
        OutOfMemoryError, bytes.live + int64_t(size) <= bytes.limit, "simulated out of memory: ",
        size, " bytes on device ", int(device), ", which holds ", bytes.live, " of ", bytes.limit);
    bytes.live += size;
    bytes.peak = std::max(bytes.peak, bytes.live);
  }
  void* data = std::aligned_alloc(64, (size + 63) / 64 * 64);
  std::memset(data, kPoison, size);
  const auto home = device == kHost ? StreamKey{kHost, 0} : current_stream(device);
  const bool of_graph = device != kHost && graph_of(home);
  auto* holder = new BlockPtr(new Block{data, size, device, home, {}, {}, of_graph});
  if (device == kHost) pinned[uintptr_t(data) + size - 1] = *holder;
  return {data, holder, &forget, place};
}

// The block that ``tensor`` lies in: a device's, or pinned memory; else nothing.
inline BlockPtr block_of(const at::Tensor& tensor) {
  const auto& data = tensor.storage().data_ptr();
  if (data.get_deleter() == &forget) return *static_cast<BlockPtr*>(data.get_context());
  return nullptr;
}

inline BlockPtr pinned_block(const void* data) {
  const Lock lock(mutex);
  const auto found = pinned.lower_bound(uintptr_t(data));
  if (found == pinned.end()) return nullptr;
  const auto block = found->second.lock();
  return block && block->data <= data ? block : nullptr;
}

// ``work`` in the queue of a stream, with what it reads or writes.
inline void enqueue_with(
    StreamKey stream, std::vector<BlockPtr> blocks, std::function<void()> work, double seconds = 0) {
  const Lock lock(mutex);
  if (auto* graph = graph_of(stream)) {
    graph->nodes.push_back([=](StreamKey now) { enqueue_with(now, blocks, work, seconds); });
    return;
  }
  refuse_if_lost(stream.first);
  for (auto& block : blocks) ++block->uses[stream];
  enqueue(stream, [stream, blocks = std::move(blocks), work = std::move(work)] {
    struct Done {
      ~Done() { for (auto& block : blocks) --block->uses[stream]; }
      const std::vector<BlockPtr>& blocks;
      StreamKey stream;
    } done{blocks, stream};
    work();
  }, seconds);
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override { return new_block(size, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Own own;
    const Lock lock(mutex);
    if (data.get_deleter() == &forget) {
      (*static_cast<BlockPtr*>(data.get_context()))->recorded.push_back(key_of(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = bytes_of[device].live;
      (*bytes)[0].peak = bytes_of[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(mutex);
    bytes_of[device].peak = bytes_of[device].live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const Lock lock(mutex);
    const auto& bytes = bytes_of[device];
    return {size_t(bytes.limit - bytes.live), size_t(bytes.limit)};
  }
};

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override { return new_block(size, kHost); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

}  // namespace simulated
