// TensorFlow's C objects as C++ values: freed with their owner.

#ifndef KMEM_DTR_TF_HANDLES_H_
#define KMEM_DTR_TF_HANDLES_H_

#include <cstdint>
#include <memory>
#include <vector>

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
inline HandlePtr Share(TFE_TensorHandle* handle) {
  return HandlePtr(
      TFE_TensorHandleCopySharingTensor(handle, NewStatus().get()));
}

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

// Of a tensor on a physical device; waits for its kernels. Empty if it is not
// plain.
inline Extent ExtentOf(TFE_TensorHandle* handle) {
  if (!IsPlainData(TFE_TensorHandleDataType(handle))) return {};
  StatusPtr status = NewStatus();
  void* start = TFE_TensorHandleDevicePointer(handle, status.get());
  if (!IsOk(status)) return {};
  const size_t bytes = TFE_TensorHandleDeviceMemorySize(handle, status.get());
  return {reinterpret_cast<uintptr_t>(start), static_cast<int64_t>(bytes)};
}

inline std::vector<int64_t> ShapeOf(TFE_TensorHandle* handle) {
  StatusPtr status = NewStatus();
  std::vector<int64_t> shape(TFE_TensorHandleNumDims(handle, status.get()));
  for (size_t i = 0; i < shape.size(); ++i) {
    shape[i] = TFE_TensorHandleDim(handle, i, status.get());
  }
  return shape;
}

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_HANDLES_H_
