// The end of operators: those that nothing wants any more, and those that are
// told to stand on their own.

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "runtime.h"

namespace kmem::dtr {

bool Runtime::IsWanted(const Operator& op) const {
  return std::any_of(op.outputs.begin(), op.outputs.end(),
                     [](const Tensor& output) { return output.wanted(); });
}

// Removes the operator if nothing wants it, then those that only it read.
void Runtime::Collect(Operator* op) {
  if (IsWanted(*op)) return;
  std::vector<Operator*> unwanted = {op};
  while (!unwanted.empty()) {
    Operator* next = unwanted.back();
    unwanted.pop_back();
    Remove(next, &unwanted);
  }
}

// Adds to `unwanted` each operator that loses its last reader by this.
void Runtime::CutInputs(Operator* op, std::vector<Operator*>* unwanted) {
  for (const Input& input : op->inputs) {
    // The last reader takes the place of this one.
    std::vector<Reader>& readers = input.tensor->readers;
    readers[input.position] = readers.back();
    const Reader& moved = readers[input.position];
    moved.op->inputs[moved.input].position = input.position;
    readers.pop_back();
    Operator* maker = input.tensor->maker;
    if (IsWanted(*maker)) {
      DropIfUnwanted(*input.tensor);
    } else {
      unwanted->push_back(maker);
    }
  }
  op->inputs.clear();
}

void Runtime::Remove(Operator* op, std::vector<Operator*>* unwanted) {
  VisitStorages(*op, [&](Storage& storage) {
    heuristic_->Restored(storage);
    storage.nanoseconds -= op->nanoseconds;
  });
  for (Tensor& output : op->outputs) {
    Undefine(output);
    std::vector<Tensor*>& tensors = output.storage->tensors;
    tensors.erase(std::find(tensors.begin(), tensors.end(), &output));
    if (!op->pure) --output.storage->num_fixed;
  }
  CutInputs(op, unwanted);
  VisitStorages(*op, [&](Storage& storage) {
    if (storage.tensors.empty()) {
      if (storage.resident) counts_.live_bytes -= storage.bytes;
      storage.resident = false;
      UpdateCandidate(storage);
    } else if (storage.resident) {
      UpdateCandidate(storage);
    } else {
      heuristic_->Evicted(storage);
    }
  });
  if (op->work != nullptr) driver_->Forget(op->work);
  operators_.back()->position = op->position;
  std::swap(operators_[op->position], operators_.back());
  operators_.pop_back();
}

Status Runtime::Settle(Tensor* tensor) {
  Operator* op = tensor->maker;
  if (!op->pure) return Status();
  // It will not run again: all that anyone wants of it has to be there.
  std::vector<Tensor*> wanted;
  for (Tensor& output : op->outputs) {
    if (output.wanted()) wanted.push_back(&output);
  }
  Status status = Lock(wanted);
  if (!status.ok()) return status;
  op->pure = false;
  for (Tensor& output : op->outputs) ++output.storage->num_fixed;
  std::vector<Operator*> unwanted;
  CutInputs(op, &unwanted);
  for (Operator* other : unwanted) Collect(other);
  if (op->work != nullptr) driver_->Forget(std::exchange(op->work, nullptr));
  Unlock(wanted);
  return Status();
}

Status Runtime::SettleReaders(Tensor* tensor) {
  std::vector<Tensor*> reached = {tensor};
  std::vector<Tensor*> held;  // Sure to outlive the settling of others.
  std::unordered_set<const Operator*> seen;
  for (size_t i = 0; i < reached.size(); ++i) {
    for (const Reader& reader : reached[i]->readers) {
      if (!seen.insert(reader.op).second) continue;
      for (Tensor& output : reader.op->outputs) {
        reached.push_back(&output);
        if (output.handles > 0) held.push_back(&output);
      }
    }
  }
  // The nearest first: those further on may be made from them.
  for (Tensor* output : held) {
    Status status = Settle(output);
    if (!status.ok()) return status;
  }
  return Status();
}

}  // namespace kmem::dtr
