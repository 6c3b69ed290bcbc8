// What was computed from what: operators, the tensors that they read and make,
// and the storages that hold the tensors' bytes.
//
// A tensor is one output of one operator. Tensors share a storage where an
// operator returns a view of what it reads. Data only; the rules by which it
// changes are in runtime.cc.

#ifndef KMEM_DTR_GRAPH_H_
#define KMEM_DTR_GRAPH_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kmem::dtr {

struct EvictedClass;
struct Operator;
struct Tensor;

struct Storage {
  static constexpr size_t kNoPosition = SIZE_MAX;

  // Whether its bytes could be given up and made again.
  bool recomputable() const { return num_fixed == 0; }

  int64_t bytes = 0;
  // The cost of making all of its tensors again, views included.
  int64_t nanoseconds = 0;
  // The runtime's clock when it was last asked for.
  int64_t last_used = 0;
  bool resident = true;
  uintptr_t address = 0;  // Where its bytes are, if the driver knows.
  int handles = 0;    // Those of its tensors, together.
  int locks = 0;      // It must stay while there are any.
  int num_fixed = 0;  // How many of its tensors are fixed.
  std::vector<Tensor*> tensors;
  size_t position = kNoPosition;  // Among the candidates for eviction.

  // What the costs in evicted_classes.h and neighbourhood.h remember.
  std::shared_ptr<EvictedClass> evicted_class;
  int64_t class_nanoseconds = 0;
  int64_t neighbourhood_nanoseconds = -1;
  uint64_t visit = 0;
};

struct Reader {
  Operator* op;
  size_t input;  // Which of its inputs.
};

struct Tensor {
  // Whether anything could ask for it again.
  bool wanted() const { return handles > 0 || !readers.empty(); }

  Operator* maker = nullptr;
  std::shared_ptr<Storage> storage;
  bool is_view = false;  // Of a storage that another operator made.
  bool defined = true;   // Has a value now. A view may lack one that its
                         // storage has, until it is made again.
  bool fixed = false;    // Cannot be made again.
  int handles = 0;       // Held from outside.
  std::vector<Reader> readers;
  void* payload = nullptr;  // The driver's value.
};

struct Input {
  Tensor* tensor;
  size_t position;  // Of this input among the tensor's readers.
};

struct Operator {
  std::vector<Input> inputs;
  std::vector<Tensor> outputs;  // Never resized: tensors keep their address.
  int64_t nanoseconds = 0;
  int64_t output_bytes = 0;  // Of the storages that it makes.
  bool pure = true;          // Can run again, with the same results.
  void* work = nullptr;      // What the driver needs to run it again.
  size_t position = 0;       // Among the runtime's operators.
  int64_t number = 0;        // In the order in which they were recorded.
};

// Calls `visit` with every storage that is read to make `storage`, and itself
// where it has views; more than once where there are several ways.
template <typename Visit>
void VisitParents(const Storage& storage, Visit visit) {
  for (const Tensor* tensor : storage.tensors) {
    for (const Input& input : tensor->maker->inputs) {
      visit(*input.tensor->storage);
    }
  }
}

// The same for every storage that is made from it.
template <typename Visit>
void VisitChildren(const Storage& storage, Visit visit) {
  for (const Tensor* tensor : storage.tensors) {
    for (const Reader& reader : tensor->readers) {
      for (const Tensor& output : reader.op->outputs) visit(*output.storage);
    }
  }
}

// The same for every storage that is made along with it, and itself.
template <typename Visit>
void VisitSiblings(const Storage& storage, Visit visit) {
  for (const Tensor* tensor : storage.tensors) {
    for (const Tensor& output : tensor->maker->outputs) visit(*output.storage);
  }
}

// Calls `visit` once for each storage that the operator makes or views.
template <typename Visit>
void VisitStorages(const Operator& op, Visit visit) {
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    Storage& storage = *op.outputs[i].storage;
    const bool seen = std::any_of(
        op.outputs.begin(), op.outputs.begin() + i,
        [&](const Tensor& other) { return other.storage.get() == &storage; });
    if (!seen) visit(storage);
  }
}

}  // namespace kmem::dtr

#endif  // KMEM_DTR_GRAPH_H_
