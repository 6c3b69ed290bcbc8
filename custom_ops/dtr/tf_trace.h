// Writes down a program that runs under DTR: in a file, in the format that
// kmem/dtr/trace.py reads, or as the numbers of simulate.h.
//
// A tensor has a name for each of its handles, which no other trace uses. What
// comes from outside has one besides that is never released, as it is there
// throughout.

#ifndef KMEM_DTR_TF_TRACE_H_
#define KMEM_DTR_TF_TRACE_H_

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.h"
#include "simulate.h"

namespace kmem::dtr {

// For one thread at a time, whatever the session.
class Trace {
 public:
  using Name = int64_t;  // 0: none.

  virtual ~Trace() = default;
  // False of names that an earlier trace gave.
  bool Knows(Name name) const { return name > first_; }
  // Whether small inputs, which operators keep, are written down as well.
  virtual bool IsComplete() const = 0;

  virtual Name Constant(int64_t bytes) = 0;
  // Returns the name of the first output; the others follow it. Inputs without
  // a name are left out of what is not complete.
  virtual Name Call(const std::string& op, const std::vector<Name>& inputs,
                    const std::vector<Output>& outputs,
                    int64_t nanoseconds) = 0;
  virtual Name Copy(Name source) = 0;
  virtual void Release(Name name) = 0;

 protected:
  inline static Name last_ = 0;

 private:
  const Name first_ = last_;
};

// A JSON object a line.
class FileTrace : public Trace {
 public:
  explicit FileTrace(const std::string& path) : file_(path) {}
  bool good() const { return file_.good(); }
  bool IsComplete() const override { return true; }

  Name Constant(int64_t bytes) override {
    Begin("CONSTANT") << NameIs(++last_) << "}\n";
    Memory(bytes);
    return last_;
  }

  Name Call(const std::string& op, const std::vector<Name>& inputs,
            const std::vector<Output>& outputs, int64_t nanoseconds) override {
    const Name first = last_ + 1;
    std::vector<Name> results;
    for (size_t i = 0; i < outputs.size(); ++i) results.push_back(first + i);
    Begin("CALL") << ", \"NAME\": \"" << op << "\", \"ARGS\": " << List(inputs)
                  << ", \"RESULT\": " << List(results) << ", \"TIME\": \""
                  << nanoseconds << "\"}\n";
    for (const Output& output : outputs) {
      ++last_;
      Memory(output.view_of == Output::kOwnStorage ? output.bytes : 0);
      Begin("ALIAS") << NameIs(last_) << ", \"ALIAS\": \"" << output.view_of
                     << "\"}\n";
    }
    return first;
  }

  Name Copy(Name source) override {
    Begin("COPY") << ", \"DST\": \"t" << ++last_ << "\", \"SRC\": \"t"
                  << source << "\"}\n";
    return last_;
  }

  void Release(Name name) override {
    Begin("RELEASE") << NameIs(name) << "}\n";
  }

 private:
  std::ostream& Begin(const char* instruction) {
    return file_ << "{\"INSTRUCTION\": \"" << instruction << '"';
  }

  void Memory(int64_t bytes) {
    Begin("MEMORY") << NameIs(last_) << ", \"MEMORY\": \"" << bytes
                    << "\"}\n";
  }

  static std::string NameIs(Name name) {
    return ", \"NAME\": \"t" + std::to_string(name) + '"';
  }

  static std::string List(const std::vector<Name>& names) {
    std::string list = "[";
    for (Name name : names) {
      if (list.size() > 1) list += ", ";
      list += "\"t" + std::to_string(name) + '"';
    }
    return list + ']';
  }

  std::ofstream file_;
};

// In memory, for the choice of a heuristic.
class ProgramTrace : public Trace {
 public:
  bool IsComplete() const override { return false; }

  Name Constant(int64_t bytes) override {
    Add({kConstant, bytes});
    constant_bytes_ += bytes;
    return Make();
  }

  Name Call(const std::string&, const std::vector<Name>& inputs,
            const std::vector<Output>& outputs, int64_t nanoseconds) override {
    nanoseconds_ += nanoseconds;
    // Where each of the inputs is among those that have a name.
    std::vector<int64_t> places, tensors;
    for (Name name : inputs) {
      places.push_back(tensors.size());
      if (name != 0) tensors.push_back(tensors_[name]);
    }
    Add({kCall, nanoseconds, static_cast<int64_t>(tensors.size())});
    Add(tensors);
    Add({static_cast<int64_t>(outputs.size())});
    const Name first = last_ + 1;
    for (const Output& output : outputs) {
      const int view_of = output.view_of;
      Add({output.bytes, view_of == Output::kOwnStorage ? Output::kOwnStorage
                                                        : places[view_of]});
      Make();
    }
    return first;
  }

  Name Copy(Name source) override {
    const int64_t tensor = tensors_[source];
    Add({kRetain, tensor});
    tensors_[++last_] = tensor;
    return last_;
  }

  void Release(Name name) override {
    const auto found = tensors_.find(name);
    Add({kRelease, found->second});
    tensors_.erase(found);
  }

  // Empty if it would be too long to be of use.
  const std::vector<int64_t>& program() const { return numbers_; }
  int64_t constant_bytes() const { return constant_bytes_; }
  int64_t nanoseconds() const { return nanoseconds_; }

 private:
  static constexpr size_t kMostNumbers = size_t{1} << 22;

  void Add(const std::vector<int64_t>& numbers) {
    if (is_full_) return;
    numbers_.insert(numbers_.end(), numbers.begin(), numbers.end());
    is_full_ = numbers_.size() > kMostNumbers;
    if (is_full_) numbers_ = {};
  }

  Name Make() {
    tensors_[++last_] = num_tensors_++;
    return last_;
  }

  std::vector<int64_t> numbers_;
  std::unordered_map<Name, int64_t> tensors_;
  int64_t num_tensors_ = 0;
  int64_t constant_bytes_ = 0;
  int64_t nanoseconds_ = 0;
  bool is_full_ = false;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_TRACE_H_
