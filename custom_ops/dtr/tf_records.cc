// What a session remembers of an operator that ran: its outputs, what it read
// from outside, and the values of variables.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tf_session.h"

namespace kmem::dtr {
namespace {

// Smaller tensors are not tracked: a record takes about as much.
constexpr int64_t kSmallestBytes = 4096;

}  // namespace

void Session::Remember(Call* call, const Timing::Interval& interval,
                       int num_outputs, TFE_TensorHandle** outputs,
                       TF_Status* status) {
  FindOutputs(call, num_outputs, outputs);
  if (call->outputs.empty()) return;
  int64_t bytes = 0;
  for (const Extent& extent : call->extents) bytes += extent.bytes;
  const int64_t nanoseconds =
      timing_.Nanoseconds(interval, call->signature->times(), bytes);
  std::vector<HandlePtr> small = FindSources(call);
  Trace::Name name = 0;
  if (trace_ != nullptr) {
    for (size_t i = 0; i < call->names.size(); ++i) {
      // One that was there before the trace began.
      Trace::Name& input = call->names[i];
      if (call->tensors[i] && !trace_->Knows(input)) {
        input = NameOf(*call->tensors[i]);
      }
    }
    name = trace_->Call(call->signature->name(), call->names, call->outputs,
                        nanoseconds);
  }
  auto* work = new Work{call->signature, std::move(small), num_outputs,
                        call->places};
  Operator* op =
      runtime_.Record(call->tensors, call->outputs, nanoseconds, true, work);
  for (size_t i = 0; i < call->places.size(); ++i) {
    outputs[call->places[i]] =
        NewHandle(call->context, &op->outputs[i], name == 0 ? 0 : name + i,
                  status);
  }
  // From now on their readers keep them.
  for (Tensor* source : call->sources) runtime_.Release(source);
}

// Which of the operator's outputs are tracked, and whose bytes they are.
void Session::FindOutputs(Call* call, int num_outputs,
                          TFE_TensorHandle** outputs) {
  std::vector<Extent>& extents = call->extents;
  const size_t num_inputs = call->given.size();
  for (size_t i = 0; i < num_inputs; ++i) {
    const Tensor* tensor = call->tensors[i];
    extents.push_back(ExtentOf(tensor ? ValueOf(tensor)->handle.get()
                                      : call->given[i]));
  }
  for (int i = 0; i < num_outputs; ++i) {
    const Extent extent = ExtentOf(outputs[i]);
    const auto holder =
        std::find_if(extents.begin(), extents.end(),
                     [&](const Extent& one) { return one.Contains(extent); });
    const size_t place = holder - extents.begin();
    Output output;
    output.bytes = extent.bytes;
    if (place < num_inputs) {
      if (call->tensors[place] == nullptr) continue;
      output.view_of = static_cast<int>(place);
    } else if (holder != extents.end()) {
      output.bytes = 0;  // It shares with another output, which counts.
    } else if (extent.bytes < kSmallestBytes) {
      continue;
    } else {
      extents.push_back(extent);
    }
    output.payload = new Value{HandlePtr(outputs[i]), nullptr};
    call->outputs.push_back(output);
    call->places.push_back(i);
  }
}

// Makes known what comes from outside, but for small inputs, which it returns:
// their operator holds them. A trace has all of them.
std::vector<HandlePtr> Session::FindSources(Call* call) {
  std::vector<HandlePtr> small;
  for (size_t i = 0; i < call->given.size(); ++i) {
    if (call->tensors[i] != nullptr) continue;
    TFE_TensorHandle* given = call->given[i];
    const bool is_left_out = trace_ == nullptr || !trace_->IsComplete();
    if (call->extents[i].bytes < kSmallestBytes && is_left_out) {
      small.resize(call->given.size());
      small[i] = Share(given);
      continue;
    }
    Tensor*& source = sources_[given];
    if (source == nullptr) {
      source = MakeOutside(Share(given), nullptr);
      call->sources.push_back(source);
    }
    call->tensors[i] = source;
    call->names[i] = ValueOf(source)->name;
  }
  return small;
}

void Session::RememberRead(const Call& call, TFE_TensorHandle** output,
                           TF_Status* status) {
  HandlePtr handle(*output);
  const Extent extent = ExtentOf(handle.get());
  if (extent.bytes < kSmallestBytes) {
    *output = handle.release();
    return;
  }
  std::vector<Tensor*>& reads = reads_[call.given[0]];
  for (Tensor* tensor : reads) {
    if (ExtentOf(ValueOf(tensor)->handle.get()).start == extent.start) {
      runtime_.Retain(tensor);
      *output = NewHandleOfRead(call.context, tensor, status);
      return;
    }
  }
  reads.push_back(MakeOutside(std::move(handle), Share(call.given[0])));
  *output = NewHandleOfRead(call.context, reads.back(), status);
}

Tensor* Session::MakeOutside(HandlePtr handle, HandlePtr variable) {
  const int64_t bytes = ExtentOf(handle.get()).bytes;
  auto* value = new Value{std::move(handle), std::move(variable)};
  if (trace_ != nullptr) value->name = trace_->Constant(bytes);
  const Output output = {bytes, Output::kOwnStorage, value};
  Operator* op = runtime_.Record({}, {output}, 0, false, nullptr);
  return value->outside = &op->outputs[0];
}

Trace::Name Session::NameOf(const Tensor& tensor) {
  Trace::Name& name = ValueOf(&tensor)->name;
  if (!trace_->Knows(name)) name = trace_->Constant(tensor.storage->bytes);
  return name;
}

TFE_TensorHandle* Session::NewHandleOfRead(TFE_Context* context,
                                           Tensor* tensor, TF_Status* status) {
  const Trace::Name name = trace_ ? trace_->Copy(NameOf(*tensor)) : 0;
  return NewHandle(context, tensor, name, status);
}

TFE_TensorHandle* Session::NewHandle(TFE_Context* context, Tensor* tensor,
                                     Trace::Name name, TF_Status* status) {
  TFE_TensorHandle* value = ValueOf(tensor)->handle.get();
  TFE_CustomDeviceTensorHandle methods;
  methods.num_dims = [](void* data, TF_Status*) {
    return static_cast<int>(static_cast<TrackedHandle*>(data)->shape.size());
  };
  methods.dim = [](void* data, int index, TF_Status*) {
    return static_cast<TrackedHandle*>(data)->shape[index];
  };
  methods.deallocator = [](void* data) {
    std::unique_ptr<TrackedHandle> handle(static_cast<TrackedHandle*>(data));
    handle->session->Release(*handle);
  };
  return TFE_NewCustomDeviceTensorHandle(
      context, kCustomDeviceName, TFE_TensorHandleDataType(value),
      new TrackedHandle{shared_from_this(), tensor, ShapeOf(value), name},
      methods, status);
}

}  // namespace kmem::dtr
