#include "tf_session.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tensorflow/c/eager/immediate_execution_context.h"
#include "tensorflow/c/eager/immediate_execution_operation.h"
#include "tensorflow/c/eager/tfe_context_internal.h"
#include "tensorflow/c/eager/tfe_op_internal.h"
#include "tensorflow/c/eager/tfe_tensorhandle_internal.h"

namespace kmem::dtr {
namespace {

// All recomputation, at most: this many times the program's own time, and a
// second for its start.
constexpr int64_t kMostSlowdown = 20;
constexpr int64_t kSecond = 1000000000;

thread_local bool knows = false;

int64_t Nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// A kernel runs: the lock is free meanwhile.
class Forgetting {
 public:
  Forgetting() {
    knows = false;
    Session::knowledge_mutex.unlock();
  }
  ~Forgetting() {
    Session::knowledge_mutex.lock();
    knows = true;
  }
};

void SetStatus(TF_Status* status, const Status& from) {
  TF_SetStatus(status,
               from.code == Code::kOperatorFailed ? TF_INTERNAL
                                                  : TF_RESOURCE_EXHAUSTED,
               from.message.c_str());
}

}  // namespace

class Session::Knowing {
 public:
  Knowing() {
    knowledge_mutex.lock();
    knows = true;
  }
  ~Knowing() {
    knows = false;
    knowledge_mutex.unlock();
  }
  Knowing(const Knowing&) = delete;
  Knowing& operator=(const Knowing&) = delete;
};

std::recursive_mutex Session::execution_mutex;
std::mutex Session::knowledge_mutex;

Session::Session(PhysicalDevice* device, std::unique_ptr<Heuristic> heuristic,
                 std::unique_ptr<Heuristic> fallback, const Options& options)
    : device_(device),
      operators_(device->name()),
      fallback_(std::move(fallback)),
      runtime_(this, std::move(heuristic), options) {}

// ------------------------------------------------------------- the first time

void Session::Execute(const TFE_Op* op, int* num_outputs,
                      TFE_TensorHandle** outputs, TF_Status* status) {
  Executing executing(execution_mutex);
  std::unique_ptr<Call> taken = std::move(idle_call_);
  if (taken == nullptr) taken = std::make_unique<Call>();
  Call& call = *taken;
  if (!Read(op, &call, status)) return;
  OpPtr run = call.signature->Take();

  Knowing knowing;
  runtime_.set_recomputation_limit(kMostSlowdown * first_nanoseconds_ +
                                   kSecond);
  Status ready;
  if (call.kind == Kind::kAssignsVariable) ready = SettleReaders(call);
  if (ready.ok()) ready = runtime_.Lock(call.tracked);
  if (!ready.ok()) {
    SetStatus(status, ready);
    return;
  }
  for (size_t i = 0; i < call.given.size(); ++i) {
    TFE_OpAddInput(run.get(),
                   call.tensors[i] ? ValueOf(call.tensors[i])->handle.get()
                                   : call.given[i],
                   status);
  }
  const int64_t start = Nanoseconds();
  RunKernel(run.get(), num_outputs, outputs, status);
  const int64_t nanoseconds = Nanoseconds() - start;
  first_nanoseconds_ += nanoseconds;
  if (TF_GetCode(status) == TF_OK) {
    if (call.kind == Kind::kPure) {
      Remember(&call, nanoseconds, *num_outputs, outputs, status);
    } else if (call.kind == Kind::kReadsVariable) {
      RememberRead(call, outputs, status);
    }
  }
  call.signature->GiveBack(std::move(run));
  runtime_.Unlock(call.tracked);
  call.Clear();
  idle_call_ = std::move(taken);
}

void Session::Call::Clear() {
  signature.reset();
  given.clear();
  tensors.clear();
  tracked.clear();
  names.clear();
  borrowed.clear();
  extents.clear();
  sources.clear();
  outputs.clear();
  places.clear();
}

bool Session::Read(const TFE_Op* op, Call* call, TF_Status* status) {
  auto* inner = tensorflow::unwrap(const_cast<TFE_Op*>(op));
  call->context = tensorflow::wrap(inner->GetContext());
  for (auto* input : inner->GetInputs()) {
    TFE_TensorHandle* given = tensorflow::wrap(input);
    const TrackedHandle* handle = TrackedHandleOf(given);
    Tensor* tensor = nullptr;
    Trace::Name name = 0;
    if (handle != nullptr && handle->session.get() == this) {
      tensor = handle->tensor;
      name = handle->name;
      call->tracked.push_back(tensor);
    } else if (handle != nullptr) {
      call->borrowed.push_back(
          handle->session->Fetch(handle->tensor, status));
      given = call->borrowed.back().get();
      if (given == nullptr) return false;
    }
    call->given.push_back(given);
    call->tensors.push_back(tensor);
    call->names.push_back(name);
  }
  call->signature = operators_.SignatureOf(op);
  call->kind = call->signature->KindWith(call->given);
  return TF_GetCode(status) == TF_OK;
}

// A variable is assigned in place if nobody has its value. Those who read it
// to make what they hold again would keep it, and the variable be copied.
Status Session::SettleReaders(const Call& call) {
  std::vector<Tensor*> values;
  for (TFE_TensorHandle* given : call.given) {
    const auto found = reads_.find(given);
    if (found == reads_.end()) continue;
    values.insert(values.end(), found->second.begin(), found->second.end());
  }
  for (Tensor* value : values) runtime_.Retain(value);
  Status status;
  for (Tensor* value : values) {
    if (status.ok()) status = runtime_.SettleReaders(value);
  }
  for (Tensor* value : values) runtime_.Release(value);
  return status;
}

void Session::RunKernel(TFE_Op* op, int* num_outputs,
                        TFE_TensorHandle** outputs, TF_Status* status) {
  no_room_.clear();
  {
    Forgetting forgetting;
    TFE_Execute(op, outputs, num_outputs, status);
    device_->Wait();  // Else its time would not be known.
  }
  if (TF_GetCode(status) == TF_RESOURCE_EXHAUSTED && !no_room_.empty()) {
    TF_SetStatus(status, TF_RESOURCE_EXHAUSTED, no_room_.c_str());
  }
}

// ----------------------------------------------------------- what comes after

HandlePtr Session::Fetch(Tensor* tensor, TF_Status* status) {
  Executing executing(execution_mutex);
  Knowing knowing;
  const Status ready = runtime_.Lock({tensor});
  if (!ready.ok()) {
    SetStatus(status, ready);
    return nullptr;
  }
  HandlePtr value = Share(ValueOf(tensor)->handle.get());
  runtime_.Unlock({tensor});
  return value;
}

void Session::Release(const TrackedHandle& handle) {
  Knowing knowing;
  if (trace_ != nullptr && handle.name != 0) trace_->Release(handle.name);
  runtime_.Release(handle.tensor);
}

bool Session::BeginTrace(const std::string& path) {
  Knowing knowing;
  trace_ = std::make_unique<Trace>(path);
  return trace_->good();
}

void Session::EndTrace() {
  Knowing knowing;
  trace_.reset();
}

bool Session::MakeRoom(int64_t bytes) {
  if (knows) return false;
  Knowing knowing;
  runtime_.set_threshold_bytes(device_->LimitBytes());
  const Status status = runtime_.MakeRoom(bytes);
  if (!status.ok()) no_room_ = status.message;
  return status.ok();
}

bool Session::MakeBlock(int64_t bytes) {
  if (knows) return false;
  Knowing knowing;
  const Status status = runtime_.MakeBlock(bytes);
  if (!status.ok()) no_room_ = status.message;
  return status.ok();
}

Statistics Session::statistics() const {
  Knowing knowing;
  return runtime_.statistics();
}

// ------------------------------------------------------------------ the driver

int64_t Session::BytesInUse() const { return device_->BytesInUse(); }

std::vector<Span> Session::Layout() const { return device_->Layout(); }

uintptr_t Session::AddressOf(const void* payload) const {
  return ExtentOf(static_cast<const Value*>(payload)->handle.get()).start;
}

Status Session::Run(const Operator& op, std::vector<void*>* payloads) {
  if (fallback_ != nullptr &&
      runtime_.recomputed_nanoseconds() > first_nanoseconds_) {
    runtime_.Use(std::move(fallback_));
  }
  const Work& work = *static_cast<const Work*>(op.work);
  StatusPtr status = NewStatus();
  OpPtr run = work.signature->Take();
  const size_t num_inputs = std::max(op.inputs.size(), work.small.size());
  for (size_t i = 0, next = 0; i < num_inputs; ++i) {
    const bool is_small = !work.small.empty() && work.small[i] != nullptr;
    TFE_OpAddInput(run.get(),
                   is_small ? work.small[i].get()
                            : ValueOf(op.inputs[next++].tensor)->handle.get(),
                   status.get());
  }
  std::vector<TFE_TensorHandle*> made(work.num_outputs);
  int num_outputs = work.num_outputs;
  RunKernel(run.get(), &num_outputs, made.data(), status.get());
  work.signature->GiveBack(std::move(run));
  if (!IsOk(status)) {
    return Status(TF_GetCode(status.get()) == TF_RESOURCE_EXHAUSTED
                      ? Code::kNoRoom
                      : Code::kOperatorFailed,
                  TF_Message(status.get()));
  }
  std::vector<HandlePtr> outputs(made.begin(), made.end());
  for (size_t i = 0; i < work.tracked.size(); ++i) {
    (*payloads)[i] =
        new Value{std::move(outputs[work.tracked[i]]), nullptr};
  }
  return Status();
}

void Session::Drop(void* payload) {
  std::unique_ptr<Value> value(static_cast<Value*>(payload));
  if (value->outside == nullptr) return;
  if (value->variable == nullptr) {
    sources_.erase(value->handle.get());
    return;
  }
  const auto found = reads_.find(value->variable.get());
  std::vector<Tensor*>& reads = found->second;
  reads.erase(std::find(reads.begin(), reads.end(), value->outside));
  if (reads.empty()) reads_.erase(found);
}

void Session::Forget(void* work) { delete static_cast<Work*>(work); }

}  // namespace kmem::dtr
