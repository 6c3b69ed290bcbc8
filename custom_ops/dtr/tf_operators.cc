#include "tf_operators.h"

#include <unordered_set>
#include <utility>

#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/immediate_execution_operation.h"
#include "tensorflow/c/eager/tfe_op_internal.h"
#include "tensorflow/core/common_runtime/eager/attr_builder.h"
#include "tensorflow/core/framework/function.pb.h"
#include "tensorflow/core/framework/op.h"

namespace kmem::dtr {
namespace {

// A program has hundreds, unless it makes functions over and over.
constexpr size_t kMostSignatures = 10000;

// Of variables, besides ReadVariableOp.
const std::unordered_set<std::string> kReaders = {
    "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp",
    "VariableShape"};

tensorflow::ImmediateExecutionOperation* Inner(const TFE_Op* op) {
  return tensorflow::unwrap(const_cast<TFE_Op*>(op));
}

bool IsStateful(const TFE_Op* op) {
  const std::string& name = Inner(op)->Name();
  const tensorflow::OpRegistrationData* registered = nullptr;
  if (tensorflow::OpRegistry::Global()->LookUp(name, &registered).ok()) {
    return registered->op_def.is_stateful();
  }
  // A function is stateful if anything in it is.
  const tensorflow::FunctionDef* function =
      Inner(op)->GetContext()->FindFunctionDef(name);
  return function == nullptr || function->signature().is_stateful();
}

}  // namespace

Signature::Signature(const TFE_Op* op, const std::string& device)
    : device_(device), original_(Copy(op)), stateful_(IsStateful(op)) {}

const std::string& Signature::name() const {
  return Inner(original_.get())->Name();
}

Kind Signature::KindWith(const std::vector<TFE_TensorHandle*>& inputs) const {
  bool has_resource = false, has_variant = false;
  for (TFE_TensorHandle* input : inputs) {
    const TF_DataType type = TFE_TensorHandleDataType(input);
    has_resource = has_resource || type == TF_RESOURCE;
    has_variant = has_variant || type == TF_VARIANT;
  }
  if (has_resource) {
    if (name() == "ReadVariableOp") return Kind::kReadsVariable;
    return kReaders.count(name()) ? Kind::kOther : Kind::kAssignsVariable;
  }
  // A variant may be a list that is changed in place.
  return has_variant || stateful_ ? Kind::kOther : Kind::kPure;
}

OpPtr Signature::Take() {
  return idle_ != nullptr ? std::move(idle_) : Copy(original_.get());
}

void Signature::GiveBack(OpPtr op) {
  Inner(op.get())->Clear();  // Of its inputs.
  idle_ = std::move(op);
}

OpPtr Signature::Copy(const TFE_Op* op) const {
  StatusPtr status = NewStatus();
  OpPtr copy(TFE_NewOp(TFE_OpGetContext(op, status.get()),
                       Inner(op)->Name().c_str(), status.get()));
  TFE_OpSetDevice(copy.get(), device_.c_str(), status.get());
  TFE_OpAddAttrs(copy.get(), TFE_OpGetAttrs(op));
  Inner(copy.get())->Clear();  // Else it would infer attributes that it has.
  return copy;
}

std::shared_ptr<Signature> Operators::SignatureOf(const TFE_Op* op) {
  // What TensorFlow finds its kernels by; computed once for an operator.
  auto* attributes = static_cast<tensorflow::AttrBuilder*>(
      const_cast<tensorflow::AbstractOpAttrs*>(Inner(op)->GetOpAttrs()));
  const Fingerprint fingerprint = attributes->CacheKey("");
  const auto known = signatures_.find(fingerprint);
  if (known != signatures_.end()) return known->second;
  if (signatures_.size() >= kMostSignatures) signatures_.clear();
  return signatures_[fingerprint] = std::make_shared<Signature>(op, device_);
}

}  // namespace kmem::dtr
