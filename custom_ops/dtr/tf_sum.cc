#include "tf_sum.h"

#include <vector>

#include "tensorflow/c/eager/immediate_execution_operation.h"
#include "tensorflow/c/eager/tfe_op_internal.h"
#include "tf_handles.h"

namespace kmem::dtr {
namespace {

// How many TensorFlow's kernel adds up at a time (aggregate_ops.cc).
constexpr int kWidth = 8;
// Addends are large if they take more than an eighth of what could be freed for
// them. In parts a sum takes half as long again: only where memory may be short.
constexpr int64_t kLargeShare = 8;

int NumInFirstPart(int num_addends) {
  const int rest = num_addends % kWidth;
  return rest < 2 ? rest + kWidth : rest;
}

// nullptr if it fails.
HandlePtr Sum(Session* session, TFE_Context* context,
              std::vector<TFE_TensorHandle*> addends, TF_Status* status) {
  OpPtr op(TFE_NewOp(context, "AddN", status));
  if (op == nullptr) return nullptr;
  TFE_OpAddInputList(op.get(), addends.data(), addends.size(), status);
  if (TF_GetCode(status) != TF_OK) return nullptr;
  int num_outputs = 1;
  TFE_TensorHandle* sum = nullptr;
  session->Execute(op.get(), &num_outputs, &sum, status);
  return TF_GetCode(status) == TF_OK ? HandlePtr(sum) : nullptr;
}

}  // namespace

bool IsLargeSum(const TFE_Op* op, const Session& session) {
  if (tensorflow::unwrap(const_cast<TFE_Op*>(op))->Name() != "AddN") {
    return false;
  }
  StatusPtr status = NewStatus();
  const int64_t num_addends = TFE_OpGetFlatInputCount(op, status.get());
  if (num_addends <= kWidth + 1) return false;  // One part.
  TFE_TensorHandle* addend = TFE_OpGetFlatInput(op, 0, status.get());
  const TF_DataType type = TFE_TensorHandleDataType(addend);
  if (!IsPlainData(type)) return false;
  const int64_t bytes = TFE_TensorHandleNumElements(addend, status.get()) *
                        static_cast<int64_t>(TF_DataTypeSize(type));
  const Statistics statistics = session.statistics();
  const int64_t stays = session.BytesInUse() - statistics.live_bytes +
                        statistics.pinned_bytes;
  const int64_t room = session.device()->LimitBytes() - stays;
  return num_addends * bytes > room / kLargeShare;
}

void ExecuteSum(Session* session, const TFE_Op* op, TFE_TensorHandle** output,
                TF_Status* status) {
  TFE_Context* context = TFE_OpGetContext(op, status);
  const int num_addends = TFE_OpGetFlatInputCount(op, status);
  std::vector<TFE_TensorHandle*> addends;
  for (int i = 0; i < num_addends; ++i) {
    addends.push_back(TFE_OpGetFlatInput(op, i, status));
  }
  auto next = addends.begin() + NumInFirstPart(num_addends);
  HandlePtr sum = Sum(session, context, {addends.begin(), next}, status);
  while (sum != nullptr && next != addends.end()) {
    const HandlePtr part =
        Sum(session, context, {next, next + kWidth}, status);
    if (part == nullptr) return;
    sum = Sum(session, context, {sum.get(), part.get()}, status);
    next += kWidth;
  }
  *output = sum.release();
}

}  // namespace kmem::dtr
