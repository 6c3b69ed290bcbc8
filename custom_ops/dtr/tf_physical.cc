#include "tf_physical.h"

#include <algorithm>
#include <atomic>

#include "../memory/device_memory.h"
#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/tfe_context_internal.h"
#include "xla/stream_executor/stream.h"

namespace kmem::dtr {
namespace {

// Number 0 of a kind, or nullptr.
tensorflow::Device* First(TFE_Context* context, const char* kind) {
  for (auto* device : tensorflow::unwrap(context)->ListLocalTfDevices()) {
    if (device->device_type() == kind && device->parsed_name().id == 0) {
      return device;
    }
  }
  return nullptr;
}

// That of a GPU. It calls back when it passes a mark, which is read later; the
// clock is the host's. Not run on a GPU yet: what waits and what is learned is
// in timing.h, and tested with a stream that is late.
class LateStream : public Stream {
 public:
  explicit LateStream(stream_executor::Stream* stream) : stream_(stream) {}

  std::shared_ptr<Mark> Put() override {
    auto mark = std::make_shared<Passed>();
    // Where it fails the time is not known.
    stream_->DoHostCallback([mark] { mark->nanoseconds = HostNanoseconds(); })
        .IgnoreError();
    return mark;
  }
  bool IsLate() const override { return true; }

 private:
  struct Passed : public Mark {
    int64_t Nanoseconds() const override { return nanoseconds; }
    std::atomic<int64_t> nanoseconds{kNotYet};
  };

  stream_executor::Stream* const stream_;
};

std::unique_ptr<Stream> StreamOf(tensorflow::Device* device) {
  const auto* info = device->tensorflow_accelerator_device_info();
  if (info == nullptr || info->stream == nullptr) {
    return std::make_unique<HostStream>();
  }
  return std::make_unique<LateStream>(info->stream);
}

}  // namespace

PhysicalDevice::PhysicalDevice(tensorflow::Device* device,
                               DeviceMemory* memory)
    : device_(device), memory_(memory), stream_(StreamOf(device)) {}

bool PhysicalDevice::Begin(int64_t limit_bytes, Evictor* evictor) {
  limit_before_ = LimitBytes();
  if (!memory_->SetLimit(std::min(limit_bytes, limit_before_))) return false;
  memory_->SetEvictor(evictor);
  return true;
}

void PhysicalDevice::End() {
  memory_->SetEvictor(nullptr);
  memory_->SetLimit(limit_before_);
}

bool PhysicalDevice::Raise(int64_t bytes) {
  if (bytes > limit_before_ - BytesInUse()) return false;
  memory_->SetLimit(std::max(BytesInUse() + bytes, LimitBytes()));
  return true;
}

int64_t PhysicalDevice::BytesInUse() const {
  return memory_->budget()->in_use();
}

int64_t PhysicalDevice::LimitBytes() const {
  return memory_->budget()->limit();
}

std::vector<Span> PhysicalDevice::Layout() const {
  const Pool* pool = memory_->pool();
  return pool == nullptr ? std::vector<Span>() : pool->Layout();
}

PhysicalDevice* ThePhysicalDevice(TFE_Context* context) {
  static PhysicalDevice* device = [&] {
    tensorflow::Device* gpu = First(context, "GPU");
    return gpu != nullptr
               ? new PhysicalDevice(gpu, MemoryOfGpu(0))
               : new PhysicalDevice(First(context, "CPU"), MemoryOfCpu());
  }();
  return device;
}

}  // namespace kmem::dtr
