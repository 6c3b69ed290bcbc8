#include "tf_physical.h"

#include <algorithm>

#include "../memory/device_memory.h"
#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/tfe_context_internal.h"

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

}  // namespace

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

void PhysicalDevice::Wait() const { device_->Sync().IgnoreError(); }

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
