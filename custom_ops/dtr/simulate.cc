#include "simulate.h"

#include <cstdio>
#include <utility>

namespace kmem::dtr {
namespace {

class Simulator : public Driver {
 public:
  Simulator(const std::vector<int64_t>& program,
            std::unique_ptr<Heuristic> heuristic, const Options& options)
      : next_(program.data()),
        end_(program.data() + program.size()),
        runtime_(this, std::move(heuristic), options) {}

  int64_t BytesInUse() const override { return runtime_.live_bytes(); }
  Status Run(const Operator& op, std::vector<void*>*) override {
    return runtime_.MakeRoom(op.output_bytes);
  }
  void Drop(void*) override {}
  void Forget(void*) override {}

  Status RunProgram() {
    while (next_ != end_) {
      Status status = RunInstruction();
      if (!status.ok()) return status;
    }
    // One by one, and each stays: together they must fit.
    for (Tensor* tensor : tensors_) {
      if (tensor == nullptr || !tensor->maker->pure) continue;
      Status status = runtime_.Lock({tensor});
      if (!status.ok()) return status;
    }
    return Status();
  }

  Statistics statistics() const { return runtime_.statistics(); }

 private:
  Status RunInstruction() {
    const int64_t instruction = Next();
    if (instruction == kConstant) return MakeConstant();
    if (instruction == kCall) return Call();
    const int64_t number = Next();
    Tensor* tensor = tensors_[number];
    if (instruction == kRetain) {
      runtime_.Retain(tensor);
      return Status();
    }
    // Known by its number no longer, as it may be gone.
    if (tensor->handles == 1) tensors_[number] = nullptr;
    runtime_.Release(tensor);
    return Status();
  }

  Status MakeConstant() {
    const Output output = {Next(), Output::kOwnStorage, nullptr};
    Status status = runtime_.MakeRoom(output.bytes);
    if (!status.ok()) return status;
    Operator* op = runtime_.Record({}, {output}, 0, false, nullptr);
    // A handle of the simulator's own, as parameters stay where they are.
    runtime_.Retain(&op->outputs[0]);
    tensors_.push_back(&op->outputs[0]);
    return Status();
  }

  Status Call() {
    const int64_t nanoseconds = Next();
    std::vector<Tensor*> inputs(Next());
    for (Tensor*& input : inputs) input = tensors_[Next()];
    std::vector<Output> outputs(Next());
    int64_t bytes = 0;
    for (Output& output : outputs) {
      output.bytes = Next();
      output.view_of = static_cast<int>(Next());
      if (output.view_of == Output::kOwnStorage) bytes += output.bytes;
    }
    Status status = runtime_.Lock(inputs);
    if (!status.ok()) return status;
    status = runtime_.MakeRoom(bytes);
    if (status.ok()) {
      Operator* op =
          runtime_.Record(inputs, outputs, nanoseconds, true, nullptr);
      for (size_t i = 0; i < outputs.size(); ++i) {
        tensors_.push_back(&op->outputs[i]);
      }
    }
    runtime_.Unlock(inputs);
    return status;
  }

  int64_t Next() { return *next_++; }

  const int64_t* next_;
  const int64_t* const end_;
  std::vector<Tensor*> tensors_;  // By number; nullptr once released.
  Runtime runtime_;
};

}  // namespace

Status Simulate(const std::vector<int64_t>& program,
                std::unique_ptr<Heuristic> heuristic, const Options& options,
                Statistics* statistics) {
  Simulator simulator(program, std::move(heuristic), options);
  Status status = simulator.RunProgram();
  *statistics = simulator.statistics();
  return status;
}

}  // namespace kmem::dtr

extern "C" {

// For Python, as declared in kmem/base/bindings.py. `options` and `statistics` are the
// fields of their structs. Returns a Code, or -1 if there is no such heuristic.
__attribute__((visibility("default"))) int kmem_dtr_simulate(
    const int64_t* program, int64_t length, const char* heuristic,
    const kmem::dtr::Options* options, kmem::dtr::Statistics* statistics,
    char* message, int64_t message_bytes) {
  std::unique_ptr<kmem::dtr::Heuristic> made =
      kmem::dtr::MakeHeuristic(heuristic, options->seed);
  if (made == nullptr) return -1;
  const kmem::dtr::Status status = kmem::dtr::Simulate(
      std::vector<int64_t>(program, program + length), std::move(made),
      *options, statistics);
  std::snprintf(message, message_bytes, "%s", status.message.c_str());
  return static_cast<int>(status.code);
}

}  // extern "C"
