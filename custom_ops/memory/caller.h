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
// Only asked once a request does not fit, which is often where memory is full.

#ifndef KMEM_MEMORY_CALLER_H_
#define KMEM_MEMORY_CALLER_H_

#include <dlfcn.h>
#include <execinfo.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace kmem {

enum class Caller { kNoticesFailure, kXla, kHostData, kOneDnn };

// What TensorFlow says of itself: no attributes, or whether they say that an
// operation's kernel is asking.
enum class Attributes { kNone, kKernel, kOther };

// The name of the function that an address lies in; null if it has none. To
// find one takes a look at all of TensorFlow's, which is a millisecond.
inline const char* SymbolOf(void* address) {
  static std::mutex mutex;
  // Never freed: a program that ends may still ask.
  static auto* symbols = new std::unordered_map<void*, const char*>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = symbols->try_emplace(address, nullptr);
  Dl_info info;
  if (is_new && dladdr(address, &info) != 0) entry->second = info.dli_sname;
  return entry->second;
}

// Calls `visit` with the symbols of the calling functions, the nearest first,
// until it returns true. Returns whether it did.
template <typename Visit>
bool VisitCallers(Visit visit) {
  void* frames[24];
  const int num_frames = backtrace(frames, 24);
  for (int i = 0; i < num_frames; ++i) {
    const char* symbol = SymbolOf(frames[i]);
    if (symbol != nullptr && visit(symbol)) return true;
  }
  return false;
}

inline bool Contains(const char* symbol, const char* part) {
  return std::strstr(symbol, part) != nullptr;
}

inline Caller FindCaller(Attributes attributes) {
  if (attributes == Attributes::kNone) return Caller::kHostData;
  Caller caller = Caller::kNoticesFailure;
  VisitCallers([&](const char* symbol) {
    if (attributes == Attributes::kKernel) {
      if (!Contains(symbol, "Mkl")) return false;
      if (!Contains(symbol, "MklMatMulOp")) caller = Caller::kOneDnn;
      return true;
    }
    if (Contains(symbol, "TfAllocatorAdapter")) {
      caller = Caller::kXla;
      return true;
    }
    // A constructor of tensorflow::Tensor, outside of a kernel.
    if (Contains(symbol, "10tensorflow6TensorC")) {
      caller = Caller::kHostData;
      return true;
    }
    return false;
  });
  return caller;
}

// Whether XLA is about to free the arguments of a computation that failed.
// They are variables that it was to update in place, and TensorFlow frees them
// once more when it is done with the variables (`PopulateExecutionInputBuffer`
// in tensorflow/compiler/jit/xla_launch_util.cc makes the second owner).
inline bool FreesArgumentsOfXla() {
  return VisitCallers([](const char* symbol) {
    return Contains(symbol, "3xla14ExecutionInputD");
  });
}

}  // namespace kmem

#endif  // KMEM_MEMORY_CALLER_H_
