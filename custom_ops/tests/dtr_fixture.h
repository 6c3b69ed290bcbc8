// A driver whose operators compute: every value is a function of the values
// that it was made from, so what is made again can be told from what is not.
// It counts its bytes on its own, as a check on the runtime's count.

#ifndef KMEM_TESTS_DTR_FIXTURE_H_
#define KMEM_TESTS_DTR_FIXTURE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "dtr/heuristic.h"
#include "dtr/runtime.h"
#include "tests/check.h"

namespace kmem::dtr {

// Memory that counts itself, and goes with the last value that is in it.
class Buffer {
 public:
  Buffer(int64_t bytes, int64_t* in_use) : bytes_(bytes), in_use_(in_use) {
    *in_use_ += bytes_;
  }
  ~Buffer() {
    *in_use_ -= bytes_;
    if (pool != nullptr) pool->Free(block);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  Pool* pool = nullptr;  // Where it is in, and where there.
  void* block = nullptr;

 private:
  const int64_t bytes_;
  int64_t* const in_use_;
};

struct Value {
  int64_t number;
  std::shared_ptr<Buffer> buffer;
};

struct Work {
  int number;  // Counts the operators from 0.
  std::vector<Output> outputs;
};

class FakeDriver : public Driver {
 public:
  int64_t BytesInUse() const override { return bytes; }

  Status Run(const Operator& op, std::vector<void*>* payloads) override {
    const Work& work = *static_cast<const Work*>(op.work);
    if (work.number == fails) return Status(Code::kOperatorFailed, "broken");
    Status status = runtime->MakeRoom(op.output_bytes);
    if (!status.ok()) return status;
    if (while_running) while_running();
    std::vector<const Tensor*> inputs;
    for (const Input& input : op.inputs) {
      CHECK_TRUE(input.tensor->defined);
      inputs.push_back(input.tensor);
    }
    status = Compute(work, inputs, payloads);
    if (status.ok()) order.push_back(work.number);
    return status;
  }

  void Drop(void* payload) override {
    const auto* value = static_cast<Value*>(payload);
    CHECK_TRUE(values.erase(value) == 1);
    delete value;
  }

  void Forget(void* work) override { delete static_cast<Work*>(work); }

  std::vector<Span> Layout() const override {
    return pool == nullptr ? std::vector<Span>() : pool->Layout();
  }
  uintptr_t AddressOf(const void* payload) const override {
    const Buffer& buffer = *static_cast<const Value*>(payload)->buffer;
    return reinterpret_cast<uintptr_t>(buffer.block);
  }

  // A place in the pool, if there is one.
  Status Find(int64_t bytes, std::shared_ptr<Buffer>* buffer) {
    void* block = nullptr;
    while (pool != nullptr &&
           (block = pool->Allocate(bytes)) == nullptr) {
      Status status = runtime->MakeBlock(bytes);
      if (!status.ok()) return status;
    }
    *buffer = std::make_shared<Buffer>(bytes, &this->bytes);
    (*buffer)->pool = pool;
    (*buffer)->block = block;
    return Status();
  }

  Status Compute(const Work& work, const std::vector<const Tensor*>& inputs,
                 std::vector<void*>* payloads) {
    std::vector<std::shared_ptr<Buffer>> buffers;
    for (const Output& output : work.outputs) {
      buffers.emplace_back();
      if (output.view_of != Output::kOwnStorage) continue;
      Status status = Find(output.bytes, &buffers.back());
      if (!status.ok()) return status;
    }
    int64_t number = 7 * work.number + 1;
    for (const Tensor* input : inputs) {
      number = (31 * number + ValueOf(*input).number) % 1000003;
    }
    payloads->clear();
    for (size_t i = 0; i < work.outputs.size(); ++i) {
      const int view_of = work.outputs[i].view_of;
      if (view_of != Output::kOwnStorage) {
        buffers[i] = ValueOf(*inputs[view_of]).buffer;
      }
      auto* value = new Value{++number, std::move(buffers[i])};
      values.insert(value);
      payloads->push_back(value);
    }
    return Status();
  }

  static const Value& ValueOf(const Tensor& tensor) {
    CHECK_TRUE(tensor.payload != nullptr);
    return *static_cast<Value*>(tensor.payload);
  }

  Runtime* runtime = nullptr;
  Pool* pool = nullptr;  // Where buffers come from, if there is one.
  int64_t bytes = 0;  // Of all buffers.
  int fails = -1;                // The operator that fails when it runs again.
  std::vector<int> order;        // What ran again.
  std::function<void()> while_running;  // Called when an operator runs again.
  std::set<const Value*> values;  // What has not been dropped.
};

// A program that runs under a runtime.
class Session {
 public:
  explicit Session(const Options& options = {},
                   const std::string& heuristic = "dtr_eq")
      : runtime(&driver, MakeHeuristic(heuristic, options.seed), options) {
    driver.runtime = &runtime;
  }

  // Runs an operator; no outputs if there is no room, or on an error.
  std::vector<Tensor*> Run(const std::vector<Tensor*>& inputs,
                           const std::vector<Output>& outputs,
                           int64_t nanoseconds = 1, bool pure = true) {
    std::vector<Tensor*> made;
    status = runtime.Lock(inputs);
    if (!status.ok()) return made;
    int64_t bytes = 0;
    for (const Output& output : outputs) {
      if (output.view_of == Output::kOwnStorage) bytes += output.bytes;
    }
    status = runtime.MakeRoom(bytes);
    if (status.ok()) {
      auto work = std::make_unique<Work>(Work{num_operators++, outputs});
      std::vector<void*> payloads;
      status = driver.Compute(*work, {inputs.begin(), inputs.end()},
                              &payloads);
      if (!status.ok()) {
        runtime.Unlock(inputs);
        return made;
      }
      std::vector<Output> recorded = outputs;
      for (size_t i = 0; i < outputs.size(); ++i) {
        recorded[i].payload = payloads[i];
      }
      Operator* op = runtime.Record(inputs, recorded, nanoseconds, pure,
                                    work.release());
      for (size_t i = 0; i < outputs.size(); ++i) {
        made.push_back(&op->outputs[i]);
      }
    }
    runtime.Unlock(inputs);
    return made;
  }

  // One output with a storage of its own; nullptr if that failed.
  Tensor* Make(const std::vector<Tensor*>& inputs, int64_t bytes,
               int64_t nanoseconds = 1) {
    const auto made = Run(inputs, {{bytes}}, nanoseconds);
    return made.empty() ? nullptr : made[0];
  }

  // From outside: cannot be made again.
  Tensor* MakeSource(int64_t bytes) {
    const auto made = Run({}, {{bytes}}, 0, false);
    return made.empty() ? nullptr : made[0];
  }

  Tensor* View(Tensor* of, int64_t nanoseconds = 1) {
    return Run({of}, {{0, 0}}, nanoseconds)[0];
  }

  // The value, made again if need be; -1 if that failed.
  int64_t Read(Tensor* tensor) {
    status = runtime.Lock({tensor});
    if (!status.ok()) return -1;
    const int64_t number = FakeDriver::ValueOf(*tensor).number;
    runtime.Unlock({tensor});
    return number;
  }

  void Release(const std::vector<Tensor*>& tensors) {
    for (Tensor* tensor : tensors) runtime.Release(tensor);
  }

  FakeDriver driver;
  Runtime runtime;
  Status status;  // Of the last call.
  int num_operators = 0;
};

// A threshold, and defaults.
inline Options Threshold(int64_t bytes) {
  Options options;
  options.threshold_bytes = bytes;
  return options;
}

// Checks an order of recomputation, as the numbers of the operators.
inline void CheckOrder(const Session& session, const std::vector<int>& order) {
  CHECK_EQUAL(session.driver.order.size(), order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    CHECK_EQUAL(session.driver.order[i], order[i]);
  }
}

}  // namespace kmem::dtr

#endif  // KMEM_TESTS_DTR_FIXTURE_H_
