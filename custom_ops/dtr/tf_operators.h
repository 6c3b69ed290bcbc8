// What kind of operator TensorFlow is about to run, and whether it may run
// again: with the same results, and without anyone noticing.

#ifndef KMEM_DTR_TF_OPERATORS_H_
#define KMEM_DTR_TF_OPERATORS_H_

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tensorflow/core/platform/fingerprint.h"
#include "tf_handles.h"
#include "timing.h"

namespace kmem::dtr {

enum class Kind {
  kPure,
  kReadsVariable,    // Gives the value of a variable, without a copy.
  kAssignsVariable,  // Or may: it is handed a variable.
  kOther,            // Runs once.
};

// What operators have in common that differ in their inputs only: the name,
// the attributes, and a TFE_Op to run. To make one for each operator would
// take as long as TensorFlow takes to run it.
class Signature {
 public:
  // Of an operator, to run on a physical device.
  Signature(const TFE_Op* op, const std::string& device);

  Kind KindWith(const std::vector<TFE_TensorHandle*>& inputs) const;
  const std::string& name() const;

  const std::shared_ptr<LeastTimes>& times() const { return times_; }

  // A TFE_Op without inputs, to be given back when it has run.
  OpPtr Take();
  void GiveBack(OpPtr op);

 private:
  OpPtr Copy(const TFE_Op* op) const;

  const std::string device_;
  const OpPtr original_;
  OpPtr idle_;  // nullptr while it runs: a Python function may call another.
  const bool stateful_;
  const std::shared_ptr<LeastTimes> times_ = std::make_shared<LeastTimes>();
};

class Operators {
 public:
  explicit Operators(std::string device) : device_(std::move(device)) {}

  std::shared_ptr<Signature> SignatureOf(const TFE_Op* op);

 private:
  using Fingerprint = tensorflow::Fprint128;

  const std::string device_;
  std::unordered_map<Fingerprint, std::shared_ptr<Signature>,
                     tensorflow::Fprint128Hasher>
      signatures_;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_OPERATORS_H_
