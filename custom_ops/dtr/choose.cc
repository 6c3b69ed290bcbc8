#include "choose.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "heuristic.h"

namespace kmem::dtr {
namespace {

// What costs least to decide comes first; "random" is no choice.
const char* const kHeuristics[] = {"dtr_eq", "ancestors",      "msps", "local",
                                   "lru",    "size_staleness", "dtr"};
// About half a second.
constexpr int64_t kMostAccesses = 50000000;

}  // namespace

const char* const kFirstHeuristic = kHeuristics[0];

Choice ChooseHeuristic(const std::vector<int64_t>& program,
                       const Options& options, const Setting& setting,
                       const std::set<std::string>& excluded) {
  Choice best;
  best.status = Status(Code::kNoRoom, "No heuristic is left.");
  Options bounded = options;
  int64_t num_accesses = 0;
  for (const char* name : kHeuristics) {
    if (excluded.count(name) > 0 || num_accesses > kMostAccesses) continue;
    Choice choice;
    choice.heuristic = name;
    choice.status = Simulate(program, MakeHeuristic(name, options.seed),
                             bounded, &choice.statistics, setting);
    num_accesses += choice.statistics.num_accesses;
    const int64_t recomputed = choice.statistics.recomputed_nanoseconds;
    if (best.heuristic.empty() ||
        (choice.status.ok() &&
         (!best.status.ok() ||
          recomputed < best.statistics.recomputed_nanoseconds))) {
      best = std::move(choice);
    }
    if (best.status.ok()) {
      bounded.recomputation_limit =
          std::min(bounded.recomputation_limit,
                   best.statistics.recomputed_nanoseconds);
    }
  }
  return best;
}

}  // namespace kmem::dtr
