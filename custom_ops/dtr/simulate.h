// Dynamic rematerialization on a program that was recorded: the runtime that
// drives the device, with operators that take time and bytes but do nothing.

#ifndef KMEM_DTR_SIMULATE_H_
#define KMEM_DTR_SIMULATE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "heuristic.h"
#include "runtime.h"

namespace kmem::dtr {

// A program is a list of numbers; tensors are numbered in the order in which
// they are made.
//   kConstant bytes                  a tensor that is there throughout
//   kCall nanoseconds, the number of inputs, the inputs, the number of
//         outputs, for each its bytes and the input that it is a view of or -1
//   kRetain tensor                   one more handle
//   kRelease tensor                  one less
// What still has a handle at the end has to be there at the end.
enum Instruction : int64_t { kConstant, kCall, kRetain, kRelease };

// What surrounds a program.
struct Setting {
  // Of a pool that tensors lie in, whose chunks the peak is of; 0 if there is
  // none.
  int64_t pool_bytes = 0;
  // Whether what is held at the end has to be there at the end.
  bool is_whole = true;
};

// Runs a program that is well-formed, as that of kmem/dtr/simulator.py is.
// `statistics` is set on failure, too.
Status Simulate(const std::vector<int64_t>& program,
                std::unique_ptr<Heuristic> heuristic, const Options& options,
                Statistics* statistics, const Setting& setting = {});

}  // namespace kmem::dtr

#endif  // KMEM_DTR_SIMULATE_H_
