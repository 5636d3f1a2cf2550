// Streams: a queue each, whose work runs as late as possible, at once, or in a random order.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

extern "C" {  // of Python.h, which not every machine has
struct _ts;
int PyGILState_Check();
_ts* PyEval_SaveThread();
void PyEval_RestoreThread(_ts*);
}

namespace simulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 8;
constexpr c10::DeviceIndex kHost = -1;
constexpr size_t kLongest = 1024;  // a launch waits when so much is queued already, as on CUDA

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
inline auto& mutex = *new std::recursive_mutex;  // never destroyed: threads outlive ``main``

// Torch asks for events with the interpreter's lock, and what is queued here may need that lock (a
// tensor that Python knows is one). So nobody keeps it who has to wait for ``mutex``.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    auto* interpreter = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (interpreter) PyEval_RestoreThread(interpreter);
  }
  Lock(const Lock&) = delete;
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kDevices> current_streams{};

inline c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}
inline StreamKey current_stream(c10::DeviceIndex device) {
  return {device, current_streams[device]};
}
inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}
inline void forget_nothing(void*) {}

// ---- what a test can set and read ----------------------------------------------------------

enum class Order : int64_t { late, eager, random };
enum class Copy : int64_t { whole, dropped, altered };

inline struct Switches {
  Order order = Order::late;
  std::mt19937_64 dice;
  bool complete = true; // know float64, and what CUDA knows but MPS does not
  std::map<std::pair<c10::DeviceIndex, c10::DeviceIndex>, Copy> links;
  std::array<int64_t, kDevices> kernels_until_failure{};  // zero: none fails
  std::array<bool, kDevices> lost{};  // as after a kernel's assertion on CUDA
  double link = 0, memory = 0;  // bytes per second; zero: it takes no time
} switches;

inline double seconds_for(double bytes, double speed) { return speed ? bytes / speed : 0; }

struct Counters {
  int64_t synchronizations = 0;  // the host waited for a device
  int64_t blocking_copies = 0;   // those of them that waited for a copy
  int64_t kernels = 0;
  int64_t to_device = 0, to_host = 0, between_devices = 0;  // messages
  int64_t bytes_to_device = 0, bytes_to_host = 0, bytes_between_devices = 0;
};
inline Counters counters;

// CPU time that goes into simulating, by thread and in all: what is left is the program's own.
inline thread_local int64_t own_nanoseconds = 0;
inline std::atomic<int64_t> own_nanoseconds_of_all{0};

class Own {
 public:
  Own() { if (!depth()++) start() = now(); }
  Own(const Own&) = delete;
  ~Own() {
    if (--depth()) return;
    const auto taken = now() - start() + reading();
    own_nanoseconds += taken;
    own_nanoseconds_of_all += taken;
  }

 private:
  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec * int64_t(1'000'000'000) + time.tv_nsec;
  }
  // What it takes to read the clock, half of which lies outside at each end.
  static int64_t reading() {
    static const auto least = [] {
      auto found = std::numeric_limits<int64_t>::max();
      for (int i = 0; i < 1000; ++i) {
        const auto before = now();
        found = std::min(found, now() - before);
      }
      return found;
    }();
    return least;
  }
  static int& depth() { static thread_local int mine = 0; return mine; }
  static int64_t& start() { static thread_local int64_t mine = 0; return mine; }
};

// ---- queues ----------------------------------------------------------------------------------

// What a card would take: each queue has a clock, which is that of the work that it has done. It has
// nothing to do with when the work runs here. A host's thread waits for it where it synchronizes.
struct Work {
  std::function<void()> run;
  double seconds, issued;
};
struct Queue {
  std::deque<Work> work;
  uint64_t issued = 0, done = 0;
  double clock = 0;
  uint64_t before_clocks = 0;   // so much was done before clocks were set to zero
  std::vector<double> clocks;   // after each work since then
  double clock_at(uint64_t number) const {
    if (number <= before_clocks || clocks.empty()) return 0;
    return clocks[std::min<size_t>(number - before_clocks, clocks.size()) - 1];
  }
};
inline std::atomic<int64_t> clocks_set{0};
inline double& host_clock() {
  static thread_local double mine = 0;
  static thread_local int64_t set = 0;
  if (set != clocks_set) set = clocks_set, mine = 0;
  return mine;
}
inline auto& queues = *new std::map<StreamKey, Queue>;
inline auto& errors = *new std::array<std::exception_ptr, kDevices>;

// Work runs as itself, in whichever thread: no autograd, no autocast, no mode of that thread's.
struct CleanThread {
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet pod{};
    pod.set_included(c10::DispatchKeySet(c10::DispatchKey::BackendSelect));
    pod.set_excluded(c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return c10::impl::LocalDispatchKeySet(pod);
  }
  c10::impl::ForceDispatchKeyGuard guard{keys()};
};

// What a stream was given while it captured, to be given again at every replay. The host must not
// wait for such a stream, nor may another one: then the capture is lost.
struct Graph {
  std::vector<std::function<void(StreamKey)>> nodes;
  bool lost = false;
};
inline auto& capturing = *new std::map<StreamKey, std::shared_ptr<Graph>>;

inline Graph* graph_of(StreamKey stream) {
  const auto found = capturing.find(stream);
  return found == capturing.end() ? nullptr : found->second.get();
}
inline void refuse_in_capture(StreamKey stream) {
  const Lock lock(mutex);
  if (auto* graph = graph_of(stream)) {
    graph->lost = true;
    TORCH_CHECK(false, "simulated error: operation not permitted when stream is capturing");
  }
}

inline void refuse_if_lost(c10::DeviceIndex device) {
  TORCH_CHECK(!switches.lost[device], "simulated error: device-side assert triggered on device ", int(device));
}

inline void run_first(StreamKey stream) {
  auto& queue = queues[stream];
  const auto work = std::move(queue.work.front());
  queue.work.pop_front();
  try {
    const CleanThread clean;
    work.run();
  } catch (...) {
    if (!errors[stream.first]) errors[stream.first] = std::current_exception();
  }
  ++queue.done;
  queue.clock = std::max(queue.clock, work.issued) + work.seconds;
  if (switches.link || switches.memory) queue.clocks.push_back(queue.clock);
}

// Run what is queued in a stream, up to the work with this number.
inline void drain(StreamKey stream, uint64_t number = std::numeric_limits<uint64_t>::max()) {
  const Lock lock(mutex);
  auto& queue = queues[stream];
  while (queue.done < std::min(number, queue.issued) && !queue.work.empty()) run_first(stream);
}

inline void enqueue(StreamKey stream, std::function<void()> work, double seconds = 0) {
  const Lock lock(mutex);
  refuse_in_capture(stream);
  auto& queue = queues[stream];
  queue.work.push_back({std::move(work), seconds, host_clock()});
  ++queue.issued;
  if (switches.order == Order::eager || queue.work.size() > kLongest) drain(stream);
  if (switches.order == Order::random) {
    for (auto& [key, other] : queues) {
      for (auto steps = switches.dice() % 3; steps && !other.work.empty(); --steps) run_first(key);
    }
  }
}

// Let ``later`` do nothing more until ``earlier`` has done what it was given up to ``number``.
inline void wait_for(StreamKey later, StreamKey earlier, uint64_t number) {
  if (later == earlier) return;
  refuse_in_capture(earlier);
  enqueue(later, [=] {
    drain(earlier, number);
    queues[later].clock = std::max(queues[later].clock, queues[earlier].clock_at(number));
  });
}
inline void wait_for(StreamKey later, StreamKey earlier) {
  const Lock lock(mutex);
  wait_for(later, earlier, queues[earlier].issued);
}

inline bool is_done(StreamKey stream, uint64_t number) {
  const Lock lock(mutex);
  return queues[stream].done >= std::min(number, queues[stream].issued);
}

// The host is at one with a device: what went wrong there is known now.
inline void surface(c10::DeviceIndex device) {
  std::exception_ptr error;
  {
    const Lock lock(mutex);
    std::swap(error, errors[device]);
  }
  if (error) std::rethrow_exception(error);
  refuse_if_lost(device);
}

// The host waits for a stream, if there is anything to wait for.
inline void synchronize(
    StreamKey stream, uint64_t number = std::numeric_limits<uint64_t>::max()) {
  const Lock lock(mutex);
  refuse_in_capture(stream);
  if (!is_done(stream, number)) ++counters.synchronizations;
  drain(stream, number);
  host_clock() = std::max(host_clock(), queues[stream].clock_at(number));
  surface(stream.first);
}

struct Event {
  StreamKey stream;
  uint64_t number = 0;
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

// ---- what torch calls ------------------------------------------------------------------------

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
    return stream(device, ++made());
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(device, ++made());
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag flag) const override {
    const Own own;
    const Lock lock(mutex);
    if (!*event) *event = new Event;
    auto& mine = *static_cast<Event*>(*event);
    mine.stream = key_of(stream);
    refuse_if_lost(stream.device_index());
    if (flag == c10::EventFlag::BACKEND_DEFAULT) {
      mine.time = std::make_shared<std::chrono::steady_clock::time_point>();
      enqueue(mine.stream, [time = mine.time] { *time = std::chrono::steady_clock::now(); });
    }
    mine.number = queues[mine.stream].issued;
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Own own;
    const Lock lock(mutex);
    const auto& mine = *static_cast<Event*>(event);
    refuse_if_lost(stream.device_index());
    wait_for(key_of(stream), mine.stream, mine.number);
  }
  bool queryEvent(void* event) const override {
    const Own own;
    const Lock lock(mutex);
    const auto& mine = *static_cast<Event*>(event);
    const auto& queue = queues[mine.stream];
    if (queue.done < mine.number && !queue.work.empty()) run_first(mine.stream);  // time goes on
    return queue.done >= mine.number;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto elapsed = *static_cast<Event*>(second)->time - *static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Own own;
    const Lock lock(mutex);
    const auto key = key_of(stream);
    if (!queues[key].work.empty()) run_first(key);
    return queues[key].work.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Own own;
    synchronize(key_of(stream));
  }
  void synchronizeEvent(void* event) const override {
    const Own own;
    const auto& mine = *static_cast<Event*>(event);
    synchronize(mine.stream, mine.number);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    const Own own;
    const Lock lock(mutex);
    for (auto& [key, queue] : queues) {
      if (key.first == device) synchronize(key);
    }
    surface(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    static_cast<c10::DeviceAllocator*>(c10::GetAllocator(kType))->recordStream(data, stream);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }

  static inline c10::DeviceIndex count = 4;

 private:
  static std::atomic<c10::StreamId>& made() {
    static std::atomic<c10::StreamId> streams{0};
    return streams;
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, index_of(device)}, id);
  }
};

}  // namespace simulated
