// Dynamic tensor rematerialization (Kirisame et al., ICLR 2021): gives up the
// tensors that are cheapest to make again when memory runs short, and makes
// them again when they are read.
//
// What an operator is, and how it runs, the driver knows: TensorFlow's custom
// device in tf_device.cc, or a recorded trace in simulate.cc. A driver runs
// an operator for the first time like this:
//
//   runtime.Lock(inputs)    they have values now, and keep them
//   ... run it, with runtime.MakeRoom(bytes) where it asks for memory ...
//   runtime.Record(inputs, outputs, ...)
//   runtime.Unlock(inputs)
//
// Rules:
// * A tensor is held by its handles. When the last handle to any tensor of a
//   storage goes, its bytes are dropped at once if they can be made again.
// * A storage that was made again and that nobody holds is not dropped at
//   once: what asked for it may ask again. It is left to the heuristic.
// * An operator that no held tensor depends on is forgotten.
// * What cannot be made again stays: what comes from outside, and what an
//   operator that is not pure has made.
// * While some inputs of an operator are made again, the others stay; but they
//   give way, and are made again as well, when nothing else is left to evict.
//
// * In a pool, storages that lie side by side go together: see window.h.
//
// For one thread at a time: the caller has a lock. The driver may call
// MakeRoom, MakeBlock, Retain and Release while an operator runs.

#ifndef KMEM_DTR_RUNTIME_H_
#define KMEM_DTR_RUNTIME_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "../memory/pool.h"
#include "candidates.h"
#include "graph.h"
#include "heuristic.h"
#include "status.h"

namespace kmem::dtr {

class Driver {
 public:
  virtual ~Driver() = default;

  // What counts against the threshold, whether the runtime knows it or not.
  virtual int64_t BytesInUse() const = 0;

  // The device's memory in the order of addresses, if it is a pool: what is
  // free in it may lie in pieces. Empty if it is not.
  virtual std::vector<Span> Layout() const { return {}; }
  // Where the bytes of a payload are; asked for if there is a layout.
  virtual uintptr_t AddressOf(const void* /*payload*/) const { return 0; }

  // Runs a pure operator again and sets a payload for each of its outputs,
  // which belong to the runtime from then on. The inputs are defined.
  virtual Status Run(const Operator& op, std::vector<void*>* payloads) = 0;

  // Frees a payload.
  virtual void Drop(void* payload) = 0;

  // The operator with this `work` will not run again.
  virtual void Forget(void* work) = 0;
};

struct Options {
  // Eviction keeps the driver's bytes at or below this.
  int64_t threshold_bytes = std::numeric_limits<int64_t>::max();
  // Smaller storages are looked at only when no other could be evicted.
  int64_t evictee_minimum_bytes = 0;
  // The time of all recomputation, at most: an end to thrashing.
  int64_t recomputation_limit = std::numeric_limits<int64_t>::max();
  bool sqrt_sampling = false;
  uint64_t seed = 0;
};

// Times are in nanoseconds.
struct Statistics {
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t pinned_bytes = 0;  // Live, and could not be made again.
  int64_t num_operators = 0;
  int64_t num_evictions = 0;
  int64_t num_recomputations = 0;
  int64_t recomputed_nanoseconds = 0;
  int64_t total_nanoseconds = 0;
  int64_t num_accesses = 0;  // Storages that the heuristic looked at.
  // What the last request without room would have needed; 0 if none.
  int64_t least_threshold_bytes = 0;
};

// What a driver tells of an output.
struct Output {
  static constexpr int kOwnStorage = -1;

  int64_t bytes = 0;
  // Which input's storage it shares, or kOwnStorage; `bytes` is unused then.
  int view_of = kOwnStorage;
  void* payload = nullptr;
};

class Runtime {
 public:
  // The driver must outlive the runtime.
  Runtime(Driver* driver, std::unique_ptr<Heuristic> heuristic,
          const Options& options);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // Makes again what lacks a value, and keeps all where they are. On failure
  // nothing is locked.
  Status Lock(const std::vector<Tensor*>& tensors);
  void Unlock(const std::vector<Tensor*>& tensors);

  // Adds an operator that has just run. Its outputs have a handle each. Inputs
  // that are nullptr are the driver's own. Not
  // `pure`: it will not run again, and does not keep its inputs. Without
  // inputs and not pure, it stands for what comes from outside. Returns
  // nullptr if it has no outputs: there is nothing to remember.
  Operator* Record(const std::vector<Tensor*>& inputs,
                   const std::vector<Output>& outputs, int64_t nanoseconds,
                   bool pure, void* work);

  void Retain(Tensor* tensor);
  // `tensor` may be gone afterwards.
  void Release(Tensor* tensor);

  // Evicts until `bytes` more fit below the threshold.
  Status MakeRoom(int64_t bytes);
  // Evicts, as there is no place for a block of `bytes` although they fit
  // below the threshold.
  Status MakeBlock(int64_t bytes);
  // Evicts what the heuristic chooses; false if there is nothing.
  bool Evict();

  // Lets another heuristic choose from now on; one that has not been in use.
  void Use(std::unique_ptr<Heuristic> heuristic);

  // Makes the tensor as one that comes from outside, so that what it was
  // made from can go. It is made again first if it has to be.
  Status Settle(Tensor* tensor);
  // Settles all held tensors that were made from this one, directly or not:
  // afterwards nothing needs its value, which may change or go. For a value
  // that is too large to keep: what is settled cannot be evicted.
  Status SettleReaders(Tensor* tensor);

  void set_threshold_bytes(int64_t bytes) { options_.threshold_bytes = bytes; }
  void set_recomputation_limit(int64_t nanoseconds) {
    options_.recomputation_limit = nanoseconds;
  }
  int64_t live_bytes() const { return counts_.live_bytes; }
  int64_t num_evictions() const { return counts_.num_evictions; }
  int64_t recomputed_nanoseconds() const {
    return counts_.recomputed_nanoseconds;
  }
  Statistics statistics() const;

 private:
  // An operator that waits for its inputs. Those before `next` are there.
  struct Waiting {
    Operator* op;  // nullptr: what the driver is about to run, which reads
    const std::vector<Tensor*>* given = nullptr;  // these.
    size_t next = 0;
    bool holds = false;  // Its inputs are locked.

    size_t num_inputs() const {
      return op == nullptr ? given->size() : op->inputs.size();
    }
    Tensor* input(size_t i) const {
      return op == nullptr ? (*given)[i] : op->inputs[i].tensor;
    }
  };

  // Evicts the cheapest storages that lie side by side, with what is free
  // between them, on `bytes` or more; false if there are none.
  bool EvictWindow(int64_t bytes);
  void Place(Storage& storage, const void* payload);

  Status RunAgain(Operator* op);
  void Hold(Waiting* waiting);
  void LetGo(Waiting* waiting);
  bool GiveWay();
  void LockStorage(Storage& storage);
  void UnlockStorage(Storage& storage);
  void UpdateCandidate(Storage& storage);

  static void Fix(Tensor& tensor);
  void Drop(Storage& storage);
  void DropIfUnwanted(const Tensor& tensor);
  void Undefine(Tensor& tensor);
  void AddLive(int64_t bytes);
  Status NoRoom(int64_t bytes);
  Status NoBlock(int64_t bytes);

  bool IsWanted(const Operator& op) const;
  void Collect(Operator* op);
  void CutInputs(Operator* op, std::vector<Operator*>* unwanted);
  void Remove(Operator* op, std::vector<Operator*>* unwanted);

  Driver* const driver_;
  std::unique_ptr<Heuristic> heuristic_;
  Options options_;
  Candidates large_;
  Candidates small_;  // Below `evictee_minimum_bytes`.
  std::vector<std::unique_ptr<Operator>> operators_;
  // The last one runs again, or is the next to; each is for the one before.
  std::vector<Waiting> waiting_;
  int times_given_way_ = 0;
  int64_t num_recorded_ = 0;
  Statistics counts_;  // But for what `statistics` adds.
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_RUNTIME_H_
