// How the core says that something could not be done: no exceptions, as the
// allocator that asks for memory could not let one pass.

#ifndef KMEM_DTR_STATUS_H_
#define KMEM_DTR_STATUS_H_

#include <string>
#include <utility>

namespace kmem::dtr {

enum class Code {
  kOk,
  kNoRoom,               // Nothing is left to evict.
  kTooMuchRecomputation,  // Above the limit that was set.
  kOperatorFailed,       // The driver could not run an operator again.
};

struct Status {
  Code code = Code::kOk;
  std::string message;

  Status() = default;
  Status(Code code, std::string message)
      : code(code), message(std::move(message)) {}
  bool ok() const { return code == Code::kOk; }
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_STATUS_H_
