#include "simulate.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "../memory/best_fit_pool.h"
#include "choose.h"

namespace kmem::dtr {
namespace {

// Where a pool would be: nothing is written there.
constexpr uintptr_t kRegion = uintptr_t{1} << 40;
constexpr int64_t kLargestPool = int64_t{1} << 46;

class Simulator : public Driver {
 public:
  Simulator(const std::vector<int64_t>& program,
            std::unique_ptr<Heuristic> heuristic, const Options& options,
            const Setting& setting)
      : next_(program.data()),
        end_(program.data() + program.size()),
        is_whole_(setting.is_whole),
        runtime_(this, std::move(heuristic), options) {
    if (setting.pool_bytes == 0) return;
    pool_ = std::make_unique<BestFitPool>(
        reinterpret_cast<void*>(kRegion),
        std::min(setting.pool_bytes, kLargestPool));
  }

  int64_t BytesInUse() const override { return runtime_.live_bytes(); }
  std::vector<Span> Layout() const override {
    return pool_ ? pool_->Layout() : std::vector<Span>();
  }
  // A payload is a place in the pool, if there is one.
  uintptr_t AddressOf(const void* payload) const override {
    return reinterpret_cast<uintptr_t>(payload);
  }
  Status Run(const Operator& op, std::vector<void*>* payloads) override {
    std::vector<Output> outputs;
    for (const Tensor& output : op.outputs) {
      outputs.push_back({output.storage->bytes,
                         output.is_view ? 0 : Output::kOwnStorage, nullptr});
    }
    const Status status = FindPlaces(op.output_bytes, &outputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      (*payloads)[i] = outputs[i].payload;
    }
    return status;
  }
  void Drop(void* payload) override {
    if (payload != nullptr) pool_->Free(payload);
  }
  void Forget(void*) override {}

  Status RunProgram() {
    while (next_ != end_) {
      Status status = RunInstruction();
      if (!status.ok()) return status;
    }
    if (!is_whole_) return Status();
    // One by one, and each stays: together they must fit.
    for (Tensor* tensor : tensors_) {
      if (tensor == nullptr || !tensor->maker->pure) continue;
      Status status = runtime_.Lock({tensor});
      if (!status.ok()) return status;
    }
    return Status();
  }

  Statistics statistics() const {
    Statistics statistics = runtime_.statistics();
    if (pool_) statistics.peak_bytes = pool_->usage().peak_chunks;
    return statistics;
  }

 private:
  // Makes room for what an operator makes, and gives it a place in the pool:
  // all of it or nothing.
  Status FindPlaces(int64_t bytes, std::vector<Output>* outputs) {
    Status status = runtime_.MakeRoom(bytes);
    for (Output& output : *outputs) {
      if (!status.ok()) break;
      if (output.view_of == Output::kOwnStorage) status = FindPlace(&output);
    }
    if (status.ok()) return status;
    for (Output& output : *outputs) {
      Drop(std::exchange(output.payload, nullptr));
    }
    return status;
  }

  Status FindPlace(Output* output) {
    if (pool_ == nullptr || output->bytes == 0) return Status();
    while (true) {
      output->payload = pool_->Allocate(output->bytes);
      if (output->payload != nullptr) return Status();
      Status status = runtime_.MakeBlock(output->bytes);
      if (!status.ok()) return status;
    }
  }

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
    std::vector<Output> outputs = {{Next(), Output::kOwnStorage, nullptr}};
    Status status = FindPlaces(outputs[0].bytes, &outputs);
    if (!status.ok()) return status;
    Operator* op = runtime_.Record({}, outputs, 0, false, nullptr);
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
    status = FindPlaces(bytes, &outputs);
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
  const bool is_whole_;
  std::vector<Tensor*> tensors_;  // By number; nullptr once released.
  std::unique_ptr<BestFitPool> pool_;
  Runtime runtime_;  // Last: it drops its payloads when it goes.
};

}  // namespace

Status Simulate(const std::vector<int64_t>& program,
                std::unique_ptr<Heuristic> heuristic, const Options& options,
                Statistics* statistics, const Setting& setting) {
  Simulator simulator(program, std::move(heuristic), options, setting);
  Status status = simulator.RunProgram();
  *statistics = simulator.statistics();
  return status;
}

}  // namespace kmem::dtr

extern "C" {

// For Python, as declared in kmem/base/bindings.py. `options` and `statistics`
// are the fields of their structs. `message` becomes what is wrong or, with the
// heuristic "auto", the one that was chosen. Returns a Code, or -1 if there is
// no such heuristic.
__attribute__((visibility("default"))) int kmem_dtr_simulate(
    const int64_t* program, int64_t length, const char* heuristic,
    const kmem::dtr::Options* options, int64_t pool_bytes,
    kmem::dtr::Statistics* statistics, char* message, int64_t message_bytes) {
  const std::vector<int64_t> instructions(program, program + length);
  const kmem::dtr::Setting setting = {pool_bytes};
  kmem::dtr::Status status;
  std::string chosen = heuristic;
  if (chosen == "auto") {
    kmem::dtr::Choice choice =
        kmem::dtr::ChooseHeuristic(instructions, *options, setting);
    chosen = choice.heuristic;
    status = choice.status;
    *statistics = choice.statistics;
  } else {
    std::unique_ptr<kmem::dtr::Heuristic> made =
        kmem::dtr::MakeHeuristic(heuristic, options->seed);
    if (made == nullptr) return -1;
    status = kmem::dtr::Simulate(instructions, std::move(made), *options,
                                 statistics, setting);
  }
  std::snprintf(message, message_bytes, "%s",
                (status.ok() ? chosen : status.message).c_str());
  return static_cast<int>(status.code);
}

}  // extern "C"
