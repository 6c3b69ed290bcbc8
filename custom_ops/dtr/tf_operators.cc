#include "tf_operators.h"

#include <algorithm>
#include <unordered_set>

#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/immediate_execution_operation.h"
#include "tensorflow/c/eager/tfe_op_internal.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tf_handles.h"

namespace kmem::dtr {
namespace {

// Of variables, besides ReadVariableOp.
const std::unordered_set<std::string> kReaders = {
    "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp",
    "VariableShape"};

bool Has(const std::vector<TFE_TensorHandle*>& inputs, TF_DataType type) {
  return std::any_of(inputs.begin(), inputs.end(), [&](auto* input) {
    return TFE_TensorHandleDataType(input) == type;
  });
}

}  // namespace

Kind Operators::KindOf(const TFE_Op* op,
                       const std::vector<TFE_TensorHandle*>& inputs) {
  const std::string& name =
      tensorflow::unwrap(const_cast<TFE_Op*>(op))->Name();
  if (Has(inputs, TF_RESOURCE)) {
    if (name == "ReadVariableOp") return Kind::kReadsVariable;
    return kReaders.count(name) ? Kind::kOther : Kind::kAssignsVariable;
  }
  // A variant may be a list that is changed in place.
  if (Has(inputs, TF_VARIANT) || IsStateful(op, name)) return Kind::kOther;
  return Kind::kPure;
}

bool Operators::IsStateful(const TFE_Op* op, const std::string& name) {
  const auto known = stateful_.find(name);
  if (known != stateful_.end()) return known->second;
  bool stateful = true;
  const tensorflow::OpRegistrationData* registered = nullptr;
  if (tensorflow::OpRegistry::Global()->LookUp(name, &registered).ok()) {
    stateful = registered->op_def.is_stateful();
  } else {
    // A function is stateful if anything in it is.
    const tensorflow::FunctionDef* function =
        tensorflow::unwrap(const_cast<TFE_Op*>(op))
            ->GetContext()
            ->FindFunctionDef(name);
    if (function != nullptr) stateful = function->signature().is_stateful();
  }
  stateful_[name] = stateful;
  return stateful;
}

}  // namespace kmem::dtr
