// A program on TensorFlow under dynamic rematerialization: the driver of the
// runtime, whose operators are TensorFlow's and run on a physical device.
//
// What is tracked: the outputs of pure operators, and values of variables.
// Everything else is a plain tensor of the physical device: what comes from
// outside, what a stateful operator makes, strings, resources and variants,
// and tensors so small that to remember them would take more than it gives.
// A pure operator that reads a plain tensor keeps it.
//
// Two locks. One operator at a time is executed (`Executing`); all that the
// runtime knows is behind another (`Knowing`), which is free while a kernel
// runs: then any thread may let go of a tensor, or have some evicted because
// it allocates.

#ifndef KMEM_DTR_TF_SESSION_H_
#define KMEM_DTR_TF_SESSION_H_

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"
#include "tf_handles.h"
#include "tf_operators.h"
#include "tf_physical.h"
#include "tf_trace.h"
#include "timing.h"

namespace kmem::dtr {

struct TrackedHandle;

class Session : public Driver, public std::enable_shared_from_this<Session> {
 public:
  class Knowing;
  using Executing = std::lock_guard<std::recursive_mutex>;

  // The device must outlive the session. `heuristic` is one of heuristic.h, or
  // "auto": the first step that evicts is written down, and the best for it is
  // taken (choose.h); another one for a step that fails.
  Session(PhysicalDevice* device, const std::string& heuristic,
          const Options& options);

  // Before a step, and behind it, while the device has the step's limit.
  void BeginStep();
  void EndStep(bool failed);
  // The name of what chooses now.
  std::string heuristic() const;

  // Runs an operator; `outputs` get handles on the custom device or plain
  // ones. TensorFlow's message of what is wrong goes into `status`.
  void Execute(const TFE_Op* op, int* num_outputs, TFE_TensorHandle** outputs,
               TF_Status* status);

  // The value of a tracked tensor, made again if need be.
  HandlePtr Fetch(Tensor* tensor, TF_Status* status);
  void Release(const TrackedHandle& handle);

  // Writes what runs from now on to a file, until `EndTrace`. Returns false if
  // that cannot be opened.
  bool BeginTrace(const std::string& path);
  void EndTrace();

  PhysicalDevice* device() const { return device_; }
  // Evicts until `bytes` more fit below the device's limit.
  bool MakeRoom(int64_t bytes);
  // Evicts, for a block of `bytes` that there is no place for.
  bool MakeBlock(int64_t bytes);
  Statistics statistics() const;

  // Of all sessions. Taken in the order in which they stand here.
  static std::recursive_mutex execution_mutex;
  static std::mutex knowledge_mutex;

  int64_t BytesInUse() const override;
  std::vector<Span> Layout() const override;
  uintptr_t AddressOf(const void* payload) const override;
  Status Run(const Operator& op, std::vector<void*>* payloads) override;
  void Drop(void* payload) override;
  void Forget(void* work) override;

 private:
  // The payload of a tensor.
  struct Value {
    HandlePtr handle;
    HandlePtr variable;         // If it is the value of one.
    Tensor* outside = nullptr;  // That tensor, if it cannot be made again.
    Trace::Name name = 0;       // Of what comes from before the trace.
  };
  // How to run an operator again.
  struct Work {
    std::shared_ptr<Signature> signature;
    // Small inputs from outside at their places, nullptr at the others. Empty
    // if there are none.
    std::vector<HandlePtr> small;
    int num_outputs;
    std::vector<int> tracked;  // Which of its outputs.
  };
  // An operator that runs for the first time.
  struct Call {
    void Clear();

    TFE_Context* context;
    std::shared_ptr<Signature> signature;
    Kind kind;
    std::vector<TFE_TensorHandle*> given;  // Its inputs.
    std::vector<Tensor*> tensors;     // Of each; nullptr for what is plain.
    std::vector<Tensor*> tracked;     // Those that are not.
    std::vector<Trace::Name> names;   // Of each; 0 for what is plain.
    std::vector<HandlePtr> borrowed;  // Values from other sessions.
    // What is recorded of it.
    std::vector<Extent> extents;  // Of its inputs, then of its outputs.
    std::vector<Tensor*> sources;  // Inputs that were not known before.
    std::vector<Output> outputs;
    std::vector<int> places;  // Of those among all its outputs.
  };

  bool Read(const TFE_Op* op, Call* call, TF_Status* status);
  Status SettleReaders(const Call& call);
  void RunKernel(TFE_Op* op, int* num_outputs, TFE_TensorHandle** outputs,
                 TF_Status* status);
  void Remember(Call* call, const Timing::Interval& interval, int num_outputs,
                TFE_TensorHandle** outputs, TF_Status* status);
  void FindOutputs(Call* call, int num_outputs, TFE_TensorHandle** outputs);
  std::vector<HandlePtr> FindSources(Call* call);
  void RememberRead(const Call& call, TFE_TensorHandle** output,
                    TF_Status* status);
  Tensor* MakeOutside(HandlePtr handle, HandlePtr variable);
  // In the trace, as of what was there before an operator reads it.
  Trace::Name NameOf(const Tensor& tensor);
  void Use(const std::string& heuristic);
  TFE_TensorHandle* NewHandle(TFE_Context* context, Tensor* tensor,
                              Trace::Name name, TF_Status* status);
  TFE_TensorHandle* NewHandleOfRead(TFE_Context* context, Tensor* tensor,
                                    TF_Status* status);

  static Value* ValueOf(const Tensor* tensor) {
    return static_cast<Value*>(tensor->payload);
  }

  PhysicalDevice* const device_;
  Operators operators_;
  // What comes from outside, by the address of its handle, which it holds.
  std::unordered_map<TFE_TensorHandle*, Tensor*> sources_;
  // The values of a variable, likewise.
  std::unordered_map<TFE_TensorHandle*, std::vector<Tensor*>> reads_;
  std::unique_ptr<Call> idle_call_;  // For the memory of its lists.
  std::unique_ptr<Trace> trace_;
  std::string no_room_;  // Why the last request was refused.
  int64_t first_nanoseconds_ = 0;
  Timing timing_;
  const bool chooses_;  // The heuristic.
  const Options options_;
  std::string heuristic_;
  // Takes its place once recomputation takes longer than the program itself.
  std::string fallback_;
  bool has_chosen_ = false;
  std::set<std::string> failed_;  // Under which this step has failed.
  // When it began.
  std::string heuristic_before_;
  int64_t in_use_before_ = 0;
  int64_t num_evictions_before_ = 0;
  Runtime runtime_;  // Last: it drops its payloads when it goes.
};

// What lies behind a handle on the custom device.
struct TrackedHandle {
  std::shared_ptr<Session> session;
  Tensor* tensor;
  Shape shape;
  Trace::Name name;  // 0 if it is in no trace.
};

extern const char* const kCustomDeviceName;

// Of a handle on the custom device, else nullptr.
TrackedHandle* TrackedHandleOf(TFE_TensorHandle* handle);

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_SESSION_H_
