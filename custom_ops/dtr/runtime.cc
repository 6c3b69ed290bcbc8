#include "runtime.h"

#include <algorithm>
#include <string>
#include <utility>

#include "window.h"

namespace kmem::dtr {
namespace {

// While the inputs of an operator are made again. More make a step possible at
// a slightly lower threshold, and a failure many times as long.
constexpr int kMostGivingWay = 16;

}  // namespace

Runtime::Runtime(Driver* driver, std::unique_ptr<Heuristic> heuristic,
                 const Options& options)
    : driver_(driver),
      heuristic_(std::move(heuristic)),
      options_(options),
      large_(options.sqrt_sampling, options.seed),
      small_(options.sqrt_sampling, options.seed) {}

Runtime::~Runtime() {
  for (const std::unique_ptr<Operator>& op : operators_) {
    for (Tensor& output : op->outputs) Undefine(output);
    if (op->work != nullptr) driver_->Forget(op->work);
  }
}

// ---------------------------------------------------------------- recording

Operator* Runtime::Record(const std::vector<Tensor*>& inputs,
                          const std::vector<Output>& outputs,
                          int64_t nanoseconds, bool pure, void* work) {
  operators_.push_back(std::make_unique<Operator>());
  Operator* op = operators_.back().get();
  op->position = operators_.size() - 1;
  op->number = ++num_recorded_;
  op->nanoseconds = nanoseconds;
  op->pure = pure;
  op->work = work;
  counts_.total_nanoseconds += nanoseconds;
  if (pure) {
    for (Tensor* input : inputs) {
      if (input == nullptr) continue;
      input->readers.push_back({op, op->inputs.size()});
      op->inputs.push_back({input, input->readers.size() - 1});
    }
  }
  op->outputs.resize(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    Tensor& tensor = op->outputs[i];
    tensor.maker = op;
    tensor.payload = outputs[i].payload;
    tensor.handles = 1;
    tensor.is_view = outputs[i].view_of != Output::kOwnStorage;
    if (tensor.is_view) {
      tensor.storage = inputs[outputs[i].view_of]->storage;
    } else {
      tensor.storage = std::make_shared<Storage>();
      tensor.storage->bytes = outputs[i].bytes;
      Place(*tensor.storage, outputs[i].payload);
      op->output_bytes += outputs[i].bytes;
    }
    Storage& storage = *tensor.storage;
    storage.tensors.push_back(&tensor);
    ++storage.handles;
    if (!pure) Fix(tensor);
  }
  AddLive(op->output_bytes);
  VisitStorages(*op, [&](Storage& storage) {
    storage.nanoseconds += nanoseconds;
    storage.last_used = counts_.total_nanoseconds;
    heuristic_->Restored(storage);
    UpdateCandidate(storage);
  });
  if (!outputs.empty()) return op;
  Collect(op);
  return nullptr;
}

void Runtime::Fix(Tensor& tensor) {
  tensor.fixed = true;
  ++tensor.storage->num_fixed;
}

void Runtime::Retain(Tensor* tensor) {
  ++tensor->handles;
  ++tensor->storage->handles;
}

void Runtime::Release(Tensor* tensor) {
  const std::shared_ptr<Storage> storage = tensor->storage;
  --tensor->handles;
  --storage->handles;
  Collect(tensor->maker);
  if (storage->handles == 0 && storage->locks == 0 && storage->resident &&
      storage->recomputable() && !storage->tensors.empty()) {
    Drop(*storage);
  }
}

// ------------------------------------------------------------------ eviction

Status Runtime::MakeRoom(int64_t bytes) {
  while (bytes > options_.threshold_bytes - driver_->BytesInUse()) {
    if (!Evict()) return NoRoom(bytes);
  }
  return Status();
}

Status Runtime::MakeBlock(int64_t bytes) {
  do {
    if (EvictWindow(bytes)) return Status();
  } while (GiveWay());
  return NoBlock(bytes);
}

bool Runtime::EvictWindow(int64_t bytes) {
  const std::vector<Span> layout = driver_->Layout();
  if (layout.empty()) return false;
  std::vector<Occupant> occupants;
  for (Candidates* candidates : {&large_, &small_}) {
    for (Storage* storage : candidates->storages()) {
      occupants.push_back(
          {storage, candidates->Weigh(*storage, *heuristic_,
                                      counts_.total_nanoseconds)});
    }
  }
  const std::vector<Storage*> window =
      CheapestWindow(layout, std::move(occupants), bytes);
  for (Storage* storage : window) {
    ++counts_.num_evictions;
    Drop(*storage);
  }
  return !window.empty();
}

void Runtime::Place(Storage& storage, const void* payload) {
  storage.address = driver_->AddressOf(payload);
}

bool Runtime::Evict() {
  Storage* storage;
  do {
    storage = large_.Choose(*heuristic_, counts_.total_nanoseconds);
    if (storage == nullptr) {
      storage = small_.Choose(*heuristic_, counts_.total_nanoseconds);
    }
  } while (storage == nullptr && GiveWay());
  if (storage == nullptr) return false;
  ++counts_.num_evictions;
  Drop(*storage);
  return true;
}

void Runtime::Use(std::unique_ptr<Heuristic> heuristic) {
  counts_.num_accesses += heuristic_->num_accesses();
  heuristic_ = std::move(heuristic);
  for (const std::unique_ptr<Operator>& op : operators_) {
    VisitStorages(*op, [&](Storage& storage) {
      const bool made_here = storage.tensors.front()->maker == op.get();
      if (made_here && !storage.resident) heuristic_->Evicted(storage);
    });
  }
}

void Runtime::Drop(Storage& storage) {
  for (Tensor* tensor : storage.tensors) Undefine(*tensor);
  storage.resident = false;
  counts_.live_bytes -= storage.bytes;
  UpdateCandidate(storage);
  heuristic_->Evicted(storage);
}

// Nobody will ask for it, but its operator has to stay for a sibling.
void Runtime::DropIfUnwanted(const Tensor& tensor) {
  Storage& storage = *tensor.storage;
  if (!tensor.wanted() && !tensor.is_view && storage.resident &&
      storage.locks == 0 && storage.recomputable()) {
    Drop(storage);
  }
}

void Runtime::Undefine(Tensor& tensor) {
  if (!tensor.defined) return;
  tensor.defined = false;
  driver_->Drop(std::exchange(tensor.payload, nullptr));
}

void Runtime::UpdateCandidate(Storage& storage) {
  // To evict what has no bytes would gain nothing.
  const bool could_go = storage.resident && storage.locks == 0 &&
                        storage.recomputable() && storage.bytes > 0;
  Candidates& candidates =
      storage.bytes < options_.evictee_minimum_bytes ? small_ : large_;
  if (could_go == candidates.Contains(storage)) return;
  if (could_go) {
    candidates.Insert(storage);
  } else {
    candidates.Erase(storage);
  }
}

void Runtime::AddLive(int64_t bytes) {
  counts_.live_bytes += bytes;
  counts_.peak_bytes = std::max(counts_.peak_bytes, counts_.live_bytes);
}

Status Runtime::NoRoom(int64_t bytes) {
  const int64_t in_use = driver_->BytesInUse();
  counts_.least_threshold_bytes = in_use + bytes;
  return Status(
      Code::kNoRoom,
      "The threshold must be at least " + std::to_string(in_use + bytes) +
          " bytes: nothing is left to evict, " + std::to_string(in_use) +
          " bytes are in use, of which " +
          std::to_string(statistics().pinned_bytes) +
          " cannot be made again, and " + std::to_string(bytes) +
          " are asked for. Received: " +
          std::to_string(options_.threshold_bytes));
}

Status Runtime::NoBlock(int64_t bytes) {
  return Status(
      Code::kNoRoom,
      "The pool must have a piece of " + std::to_string(bytes) +
          " bytes, and nothing that is left to evict lies around one: " +
          std::to_string(driver_->BytesInUse()) +
          " bytes are in use, of which " +
          std::to_string(statistics().pinned_bytes) +
          " cannot be made again. Received: a threshold of " +
          std::to_string(options_.threshold_bytes) + " bytes");
}

// ---------------------------------------------------------- rematerialization

// A stack of its own: chains of evicted operators are as long as programs.
Status Runtime::Lock(const std::vector<Tensor*>& tensors) {
  // The handles keep them if the program lets go of them meanwhile.
  for (Tensor* tensor : tensors) Retain(tensor);
  times_given_way_ = 0;
  waiting_.push_back({nullptr, &tensors});
  Status status;
  while (true) {
    Waiting& top = waiting_.back();
    if (status.ok() && !top.holds) Hold(&top);
    if (status.ok() && top.next < top.num_inputs()) {
      const Tensor& input = *top.input(top.next);
      if (input.defined) {
        ++top.next;
      } else {
        waiting_.push_back({input.maker});
      }
      continue;
    }
    if (top.op == nullptr) break;
    // After a failure the rest of the stack only lets go of its inputs.
    if (status.ok()) status = RunAgain(top.op);
    LetGo(&top);
    waiting_.pop_back();
  }
  if (!status.ok()) {
    LetGo(&waiting_.back());
    for (Tensor* tensor : tensors) Release(tensor);
  }
  waiting_.pop_back();
  return status;
}

void Runtime::Unlock(const std::vector<Tensor*>& tensors) {
  for (Tensor* tensor : tensors) UnlockStorage(*tensor->storage);
  for (Tensor* tensor : tensors) Release(tensor);
}

// All before any is made again: they must not push each other out.
void Runtime::Hold(Waiting* waiting) {
  for (size_t i = 0; i < waiting->num_inputs(); ++i) {
    LockStorage(*waiting->input(i)->storage);
  }
  waiting->holds = true;
  waiting->next = 0;
}

void Runtime::LetGo(Waiting* waiting) {
  if (!waiting->holds) return;
  for (size_t i = 0; i < waiting->num_inputs(); ++i) {
    UnlockStorage(*waiting->input(i)->storage);
  }
  waiting->holds = false;
}

// When nothing else is left to evict, the inputs of what has to wait longest
// can go: it looks for them again when it is its turn. Not for ever, as two of
// them may have no room beside each other.
bool Runtime::GiveWay() {
  if (times_given_way_ == kMostGivingWay) return false;
  for (size_t i = 0; i + 1 < waiting_.size(); ++i) {
    if (!waiting_[i].holds) continue;
    ++times_given_way_;
    LetGo(&waiting_[i]);
    return true;
  }
  return false;
}

Status Runtime::RunAgain(Operator* op) {
  if (op->nanoseconds >
      options_.recomputation_limit - counts_.recomputed_nanoseconds) {
    return Status(
        Code::kTooMuchRecomputation,
        "Recomputation must end: the threshold is so low that operators run "
        "over and over. Raise it, or try another: heuristic=\"ancestors\" "
        "recomputes far less in recurrent models, and `kmem simulate --best` "
        "compares all heuristics on a recorded step. It has taken " +
            std::to_string(counts_.recomputed_nanoseconds) +
            " ns, the limit is " +
            std::to_string(options_.recomputation_limit) +
            " ns. Received: a threshold of " +
            std::to_string(options_.threshold_bytes) + " bytes");
  }
  std::vector<void*> payloads(op->outputs.size(), nullptr);
  Status status = driver_->Run(*op, &payloads);
  if (!status.ok()) return status;
  ++counts_.num_recomputations;
  counts_.recomputed_nanoseconds += op->nanoseconds;
  counts_.total_nanoseconds += op->nanoseconds;
  // All outputs were made, also those that were still there.
  AddLive(op->output_bytes);
  for (size_t i = 0; i < op->outputs.size(); ++i) {
    Tensor& output = op->outputs[i];
    Storage& storage = *output.storage;
    if (output.defined) {
      driver_->Drop(payloads[i]);
      if (!output.is_view) counts_.live_bytes -= storage.bytes;
      continue;
    }
    output.defined = true;
    output.payload = payloads[i];
    if (output.is_view) continue;
    storage.resident = true;
    Place(storage, output.payload);
    heuristic_->Restored(storage);
    UpdateCandidate(storage);
    DropIfUnwanted(output);  // Made along with what was asked for.
  }
  return Status();
}

void Runtime::LockStorage(Storage& storage) {
  ++storage.locks;
  storage.last_used = counts_.total_nanoseconds;
  UpdateCandidate(storage);
}

void Runtime::UnlockStorage(Storage& storage) {
  --storage.locks;
  UpdateCandidate(storage);
}

// -------------------------------------------------------------- statistics

Statistics Runtime::statistics() const {
  Statistics statistics = counts_;
  statistics.num_operators = operators_.size();
  statistics.num_accesses += heuristic_->num_accesses() +
                             large_.num_accesses() + small_.num_accesses();
  for (const std::unique_ptr<Operator>& op : operators_) {
    VisitStorages(*op, [&](const Storage& storage) {
      if (storage.resident && !storage.recomputable() &&
          storage.tensors.front()->maker == op.get()) {
        statistics.pinned_bytes += storage.bytes;
      }
    });
  }
  return statistics;
}

}  // namespace kmem::dtr
