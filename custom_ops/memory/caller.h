// Who asks for memory, and whether it can be refused.
//
// TensorFlow does not check every allocation on the CPU: some callers go on
// with the null pointer and the process dies. What they ask for is granted,
// even above the limit:
//
// * Data that comes from Python, NumPy or an input pipeline, and Eigen's
//   scratch memory. On an accelerator these bytes are the host's.
// * oneDNN kernels, whose names have an Mkl in them. Most allocate in helper
//   functions that return early on failure, to a caller that does not notice.
//   Their bytes are the device's, so the next operation is refused in their
//   stead. Multiplying matrices is among those that do notice.
//
// Only asked once a request does not fit, so time does not matter here.

#ifndef KMEM_MEMORY_CALLER_H_
#define KMEM_MEMORY_CALLER_H_

#include <dlfcn.h>
#include <execinfo.h>

#include <cstring>

namespace kmem {

enum class Caller { kNoticesFailure, kHostData, kOneDnn };

// What TensorFlow says of itself: no attributes, or whether they say that an
// operation's kernel is asking.
enum class Attributes { kNone, kKernel, kOther };

inline Caller FindCaller(Attributes attributes) {
  if (attributes == Attributes::kNone) return Caller::kHostData;
  const bool kernel = attributes == Attributes::kKernel;
  void* frames[24];
  const int num_frames = backtrace(frames, 24);
  for (int i = 0; i < num_frames; ++i) {
    Dl_info info;
    if (dladdr(frames[i], &info) == 0 || info.dli_sname == nullptr) continue;
    const char* symbol = info.dli_sname;
    if (kernel && std::strstr(symbol, "Mkl") != nullptr) {
      return std::strstr(symbol, "MklMatMulOp") != nullptr
                 ? Caller::kNoticesFailure
                 : Caller::kOneDnn;
    }
    // A constructor of tensorflow::Tensor, outside of a kernel. XLA, which
    // gives the same attributes, does not go through it.
    if (!kernel && std::strstr(symbol, "10tensorflow6TensorC") != nullptr) {
      return Caller::kHostData;
    }
  }
  return Caller::kNoticesFailure;
}

}  // namespace kmem

#endif  // KMEM_MEMORY_CALLER_H_
