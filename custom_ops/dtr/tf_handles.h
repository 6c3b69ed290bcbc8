// TensorFlow's C objects as C++ values: freed with their owner.
//
// What is asked of every operand goes to TensorFlow's own classes: a call of
// the C API makes a status, and all of them together would take as long as an
// operator does.

#ifndef KMEM_DTR_TF_HANDLES_H_
#define KMEM_DTR_TF_HANDLES_H_

#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "tensorflow/c/eager/c_api.h"
#include "tensorflow/c/eager/c_api_experimental.h"

namespace kmem::dtr {

struct Deleter {
  void operator()(TFE_TensorHandle* handle) const {
    TFE_DeleteTensorHandle(handle);
  }
  void operator()(TFE_Op* op) const { TFE_DeleteOp(op); }
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};

using HandlePtr = std::unique_ptr<TFE_TensorHandle, Deleter>;
using OpPtr = std::unique_ptr<TFE_Op, Deleter>;
using StatusPtr = std::unique_ptr<TF_Status, Deleter>;

inline StatusPtr NewStatus() { return StatusPtr(TF_NewStatus()); }

inline bool IsOk(const StatusPtr& status) {
  return TF_GetCode(status.get()) == TF_OK;
}

// One more reference to the same handle: its address stays the same.
HandlePtr Share(TFE_TensorHandle* handle);

// Whether a tensor of this type is plain bytes. Others are never tracked.
inline bool IsPlainData(TF_DataType type) {
  return type != TF_STRING && type != TF_RESOURCE && type != TF_VARIANT;
}

// Where a tensor's bytes are.
struct Extent {
  bool Contains(const Extent& other) const {
    return other.start >= start && other.start < start + bytes;
  }

  uintptr_t start = 0;
  int64_t bytes = 0;
};

// Of a tensor on a physical device, once it is there. Empty if it is not plain.
Extent ExtentOf(TFE_TensorHandle* handle);

using Shape = absl::InlinedVector<int64_t, 4>;
Shape ShapeOf(TFE_TensorHandle* handle);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_HANDLES_H_
