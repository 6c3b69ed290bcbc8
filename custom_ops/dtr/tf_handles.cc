#include "tf_handles.h"

#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"
#include "tensorflow/core/common_runtime/eager/tensor_handle.h"

namespace kmem::dtr {

HandlePtr Share(TFE_TensorHandle* handle) {
  tensorflow::unwrap(handle)->Ref();
  return HandlePtr(handle);
}

Extent ExtentOf(TFE_TensorHandle* handle) {
  auto* inner = tensorflow::unwrap(handle);
  const bool is_local = tensorflow::TensorHandle::classof(inner);
  if (!is_local || !IsPlainData(TFE_TensorHandleDataType(handle))) return {};
  const tensorflow::Tensor* tensor = nullptr;
  if (!static_cast<tensorflow::TensorHandle*>(inner)->Tensor(&tensor).ok()) {
    return {};
  }
  return {reinterpret_cast<uintptr_t>(tensor->data()),
          static_cast<int64_t>(tensor->TotalBytes())};
}

Shape ShapeOf(TFE_TensorHandle* handle) {
  auto* inner = tensorflow::unwrap(handle);
  int num_dims = 0;
  inner->NumDims(&num_dims).IgnoreError();
  Shape shape(num_dims);
  for (int i = 0; i < num_dims; ++i) {
    inner->Dim(i, &shape[i]).IgnoreError();
  }
  return shape;
}

}  // namespace kmem::dtr
