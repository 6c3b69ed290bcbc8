// Which heuristic to evict by: no single one is the best of all programs, nor
// at all thresholds. A step that was recorded is simulated under each.

#ifndef KMEM_DTR_CHOOSE_H_
#define KMEM_DTR_CHOOSE_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "runtime.h"
#include "simulate.h"
#include "status.h"

namespace kmem::dtr {

struct Choice {
  std::string heuristic;
  Statistics statistics;
  Status status;  // If it is not that of success, none of them works.
};

// What a program begins with, until it is known.
extern const char* const kFirstHeuristic;

// The heuristic under which a program takes the least time: the first in the
// order in which they are tried, of those that take as long. Each that takes
// longer than the best up to then is ended. There is an end to looking, too,
// for programs that would take seconds. Those in `excluded` are left out.
Choice ChooseHeuristic(const std::vector<int64_t>& program,
                       const Options& options, const Setting& setting,
                       const std::set<std::string>& excluded = {});

}  // namespace kmem::dtr

#endif  // KMEM_DTR_CHOOSE_H_
