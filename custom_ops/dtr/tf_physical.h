// The devices that operators really run on.

#ifndef KMEM_DTR_TF_PHYSICAL_H_
#define KMEM_DTR_TF_PHYSICAL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../memory/evictor.h"
#include "../memory/pool.h"
#include "tensorflow/c/eager/c_api.h"
#include "tensorflow/core/framework/device.h"
#include "timing.h"

namespace kmem {
class DeviceMemory;
}

namespace kmem::dtr {

class PhysicalDevice {
 public:
  PhysicalDevice(tensorflow::Device* device, DeviceMemory* memory);

  const std::string& name() const { return device_->name(); }

  // Until `End`: sets a limit, if it is lower than the one there is, and has
  // `evictor` asked when memory runs short. Returns false, and changes
  // nothing, if more is in use.
  bool Begin(int64_t limit_bytes, Evictor* evictor);
  void End();
  // Raises the limit so that `bytes` more fit. Returns false, and changes
  // nothing, if that is more than the limit there was before `Begin`.
  bool Raise(int64_t bytes);

  int64_t BytesInUse() const;
  int64_t LimitBytes() const;

  // Of its pool; empty if it has none.
  std::vector<Span> Layout() const;

  // What it works off: kernels of a GPU run after their operator returns.
  Stream* stream() const { return stream_.get(); }

 private:
  tensorflow::Device* const device_;
  DeviceMemory* const memory_;
  const std::unique_ptr<Stream> stream_;
  int64_t limit_before_ = 0;
};

// GPU:0 if there is one, else the CPU. Never destroyed.
PhysicalDevice* ThePhysicalDevice(TFE_Context* context);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_PHYSICAL_H_
