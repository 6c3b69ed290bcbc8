#include "tf_session.h"

#include <algorithm>
#include <utility>

#include "choose.h"
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
// Of a step that is simulated, in times of its own.
constexpr int64_t kMostRecomputation = 4;

thread_local bool knows = false;

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

// Where the classes of dtr_eq, which cannot be parted again, make it evict what
// it wants next, the exact cost takes over.
std::string FallbackOf(const std::string& heuristic) {
  return heuristic == "dtr_eq" ? "ancestors" : "";
}

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

Session::Session(PhysicalDevice* device, const std::string& heuristic,
                 const Options& options)
    : device_(device),
      operators_(device->name()),
      timing_(device->stream()),
      chooses_(heuristic == "auto"),
      options_(options),
      heuristic_(chooses_ ? kFirstHeuristic : heuristic),
      fallback_(FallbackOf(heuristic_)),
      runtime_(this, MakeHeuristic(heuristic_, options.seed), options) {}

// ------------------------------------------------------------------- its steps

void Session::BeginStep() {
  Knowing knowing;
  // Not while a file is written.
  if (!chooses_ || trace_ != nullptr) return;
  trace_ = std::make_unique<ProgramTrace>();
  heuristic_before_ = heuristic_;
  in_use_before_ = device_->BytesInUse();
  num_evictions_before_ = runtime_.num_evictions();
}

void Session::EndStep(bool failed) {
  Executing executing(execution_mutex);
  Knowing knowing;
  const auto* step = dynamic_cast<const ProgramTrace*>(trace_.get());
  if (step == nullptr) return;
  const std::unique_ptr<Trace> trace = std::move(trace_);
  if (failed) {
    failed_.insert({heuristic_before_, heuristic_});
  } else {
    failed_.clear();
  }
  const bool evicted = runtime_.num_evictions() > num_evictions_before_;
  if (step->program().empty() || !(failed || (evicted && !has_chosen_))) {
    return;
  }
  has_chosen_ = true;
  // What it does not read is in memory beside it.
  const int64_t beside =
      std::max<int64_t>(in_use_before_ - step->constant_bytes(), 0);
  int64_t pool_bytes = 0;
  for (const Span& span : device_->Layout()) pool_bytes += span.bytes;
  Options options = options_;
  options.threshold_bytes = device_->LimitBytes() - beside;
  options.recomputation_limit = kMostRecomputation * step->nanoseconds();
  const Setting setting = {std::max<int64_t>(pool_bytes - beside, 0),
                           /*is_whole=*/false};
  const Choice choice =
      ChooseHeuristic(step->program(), options, setting, failed_);
  if (choice.status.ok() && choice.heuristic != heuristic_) {
    Use(choice.heuristic);
    fallback_ = FallbackOf(heuristic_);
  }
}

void Session::Use(const std::string& heuristic) {
  heuristic_ = heuristic;
  runtime_.Use(MakeHeuristic(heuristic, options_.seed));
}

std::string Session::heuristic() const {
  Knowing knowing;
  return heuristic_;
}

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
  Timing::Interval interval = timing_.Begin(*call.signature->times());
  RunKernel(run.get(), num_outputs, outputs, status);
  timing_.End(&interval);
  first_nanoseconds_ += Timing::Known(interval);
  if (TF_GetCode(status) == TF_OK) {
    if (call.kind == Kind::kPure) {
      Remember(&call, interval, *num_outputs, outputs, status);
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
  if (trace_ != nullptr && trace_->Knows(handle.name)) {
    trace_->Release(handle.name);
  }
  runtime_.Release(handle.tensor);
}

bool Session::BeginTrace(const std::string& path) {
  Knowing knowing;
  auto trace = std::make_unique<FileTrace>(path);
  const bool is_good = trace->good();
  trace_ = std::move(trace);
  return is_good;
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
  if (!fallback_.empty() &&
      runtime_.recomputed_nanoseconds() > first_nanoseconds_) {
    Use(std::exchange(fallback_, ""));
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
