// What kind of operator TensorFlow is about to run, and whether it may run
// again: with the same results, and without anyone noticing.

#ifndef KMEM_DTR_TF_OPERATORS_H_
#define KMEM_DTR_TF_OPERATORS_H_

#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/c/eager/c_api.h"

namespace kmem::dtr {

enum class Kind {
  kPure,
  kReadsVariable,    // Gives the value of a variable, without a copy.
  kAssignsVariable,  // Or may: it is handed a variable.
  kOther,            // Runs once.
};

class Operators {
 public:
  Kind KindOf(const TFE_Op* op, const std::vector<TFE_TensorHandle*>& inputs);

 private:
  bool IsStateful(const TFE_Op* op, const std::string& name);

  std::unordered_map<std::string, bool> stateful_;  // By name.
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_OPERATORS_H_
