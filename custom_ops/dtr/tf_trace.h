// Writes down a program that runs under DTR, in the format that
// kmem/dtr/program.py reads: a JSON object a line.
//
// A tensor has a name for each of its handles. What comes from outside has one
// besides that is never released, as it is there throughout.

#ifndef KMEM_DTR_TF_TRACE_H_
#define KMEM_DTR_TF_TRACE_H_

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "runtime.h"

namespace kmem::dtr {

class Trace {
 public:
  using Name = int64_t;

  explicit Trace(const std::string& path) : file_(path) {}
  bool good() const { return file_.good(); }

  Name Constant(int64_t bytes) {
    Begin("CONSTANT") << NameIs(++last_) << "}\n";
    Memory(bytes);
    return last_;
  }

  // Returns the name of the first output; the others follow it.
  Name Call(const std::string& op, const std::vector<Name>& inputs,
            const std::vector<Output>& outputs, int64_t nanoseconds) {
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

  Name Copy(Name source) {
    Begin("COPY") << ", \"DST\": \"t" << ++last_ << "\", \"SRC\": \"t"
                  << source << "\"}\n";
    return last_;
  }

  void Release(Name name) { Begin("RELEASE") << NameIs(name) << "}\n"; }

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
  Name last_ = 0;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TF_TRACE_H_
