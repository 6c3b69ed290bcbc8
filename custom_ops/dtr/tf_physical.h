// The devices that operators really run on.

#ifndef KMEM_DTR_TF_PHYSICAL_H_
#define KMEM_DTR_TF_PHYSICAL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "tensorflow/c/eager/c_api.h"

namespace kmem::dtr {

class PhysicalDevice {
 public:
  virtual ~PhysicalDevice() = default;

  virtual const std::string& name() const = 0;
  // Sets a limit, if it is lower than the one there is, until the next call of
  // `End`. Returns false, and changes nothing, if more is in use.
  virtual bool Begin(int64_t limit_bytes) = 0;
  virtual void End() = 0;
  // Raises the limit so that `bytes` more fit. Returns false, and changes
  // nothing, if that is more than the limit there was before `Begin`.
  virtual bool Raise(int64_t bytes) = 0;
  virtual int64_t BytesInUse() const = 0;
  virtual int64_t LimitBytes() const = 0;

  // Waits for all kernels: those of a GPU run after their operator returns.
  virtual void Wait() const = 0;
  // Whether it refuses memory without asking for room first: an operator that
  // fails for it has to be tried again.
  virtual bool must_retry() const = 0;
};

// The CPU, whose allocator is ours: its limit is exact.
PhysicalDevice* TheCpu(TFE_Context* context);

// GPU:0, or nullptr if there is none. Its allocator is TensorFlow's: the limit
// is kept between operators, and may be exceeded by the one that runs.
PhysicalDevice* TheGpu(TFE_Context* context);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_PHYSICAL_H_
