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
    if (output.fixed) --output.storage->num_fixed;
  }
  CutInputs(op, unwanted);
  VisitStorages(*op, [&](Storage& storage) {
    const bool has_value =
        std::any_of(storage.tensors.begin(), storage.tensors.end(),
                    [](const Tensor* tensor) { return tensor->defined; });
    if (storage.resident && !has_value) {
      counts_.live_bytes -= storage.bytes;
      storage.resident = false;
    } else if (!storage.resident && !storage.tensors.empty()) {
      heuristic_->Evicted(storage);
    }
    UpdateCandidate(storage);
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
  for (Tensor& output : op->outputs) {
    if (output.wanted()) {
      Fix(output);
    } else if (output.is_view) {
      Undefine(output);  // It would keep the storage of another.
    }
  }
  std::vector<Operator*> unwanted;
  CutInputs(op, &unwanted);
  for (Operator* other : unwanted) Collect(other);
  if (op->work != nullptr) driver_->Forget(std::exchange(op->work, nullptr));
  Unlock(wanted);
  return Status();
}

Status Runtime::SettleReaders(Tensor* tensor) {
  std::vector<Tensor*> reached = {tensor};
  std::vector<Tensor*> held;
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
  // Handles, so that each outlives the settling of the others.
  for (Tensor* output : held) Retain(output);
  Status status;
  // The latest first: what an operator has made for those alone that are
  // settled already need not be there.
  std::sort(held.begin(), held.end(), [](Tensor* one, Tensor* other) {
    return one->maker->number > other->maker->number;
  });
  for (Tensor* output : held) {
    if (status.ok()) status = Settle(output);
  }
  for (Tensor* output : held) Release(output);
  return status;
}

}  // namespace kmem::dtr
