#include "tf_physical.h"

#include <algorithm>
#include <limits>

#include "../memory/budget_allocator.h"
#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/tfe_context_internal.h"
#include "tensorflow/core/framework/device.h"

namespace kmem::dtr {
namespace {

class Cpu : public PhysicalDevice {
 public:
  explicit Cpu(std::string name) : name_(std::move(name)) {}

  const std::string& name() const override { return name_; }

  bool Begin(int64_t limit_bytes) override {
    limit_before_ = TheBudget()->limit();
    return TheBudget()->SetLimit(std::min(limit_bytes, limit_before_));
  }
  void End() override { TheBudget()->SetLimit(limit_before_); }
  bool Raise(int64_t bytes) override {
    if (bytes > limit_before_ - BytesInUse()) return false;
    TheBudget()->SetLimit(std::max(BytesInUse() + bytes, LimitBytes()));
    return true;
  }

  int64_t BytesInUse() const override { return TheBudget()->in_use(); }
  int64_t LimitBytes() const override { return TheBudget()->limit(); }
  void Wait() const override {}
  bool must_retry() const override { return false; }

 private:
  const std::string name_;
  int64_t limit_before_ = Budget::kNoLimit;
};

class Gpu : public PhysicalDevice {
 public:
  Gpu(std::string name, tensorflow::Device* device)
      : name_(std::move(name)),
        device_(device),
        allocator_(device->GetAllocator(tensorflow::AllocatorAttributes())) {}

  const std::string& name() const override { return name_; }

  bool Begin(int64_t limit_bytes) override {
    if (BytesInUse() > limit_bytes) return false;
    limit_bytes_ = limit_bytes;
    return true;
  }
  void End() override {}
  // Nobody would ask: its allocator does not.
  bool Raise(int64_t) override { return false; }

  int64_t BytesInUse() const override {
    const auto stats = allocator_->GetStats();
    return stats ? stats->bytes_in_use : 0;
  }
  int64_t LimitBytes() const override {
    const auto stats = allocator_->GetStats();
    return stats && stats->bytes_limit
               ? std::min<int64_t>(limit_bytes_, *stats->bytes_limit)
               : limit_bytes_;
  }
  void Wait() const override { device_->Sync().IgnoreError(); }
  bool must_retry() const override { return true; }

 private:
  const std::string name_;
  tensorflow::Device* const device_;
  tensorflow::Allocator* const allocator_;
  int64_t limit_bytes_ = std::numeric_limits<int64_t>::max();
};

}  // namespace

// Never destroyed, like TensorFlow's own. Their names have the process's job
// and task in a cluster.
PhysicalDevice* TheCpu(TFE_Context* context) {
  static PhysicalDevice* cpu =
      new Cpu(tensorflow::unwrap(context)->HostCPUName());
  return cpu;
}

PhysicalDevice* TheGpu(TFE_Context* context) {
  static PhysicalDevice* gpu = [&]() -> PhysicalDevice* {
    for (auto* device : tensorflow::unwrap(context)->ListLocalTfDevices()) {
      if (device->device_type() == "GPU" &&
          device->parsed_name().id == 0) {
        return new Gpu(device->name(), device);
      }
    }
    return nullptr;
  }();
  return gpu;
}

}  // namespace kmem::dtr
