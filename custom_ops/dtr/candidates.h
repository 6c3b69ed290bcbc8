// The storages that could be evicted now, and the choice among them.
//
// First goes what nobody would miss: it was made again, nobody holds it, and
// all that was made from it is there. Of several the last used, as what made
// it is wanted next. The rest is the heuristic's to rank.
//
// To look at all of them takes time at every eviction. With `sample`, about
// the square root of their number is looked at, drawn anew each time
// (MegEngine's enable_sqrt_sampling, which takes the first ones instead).

#ifndef KMEM_DTR_CANDIDATES_H_
#define KMEM_DTR_CANDIDATES_H_

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "graph.h"
#include "heuristic.h"

namespace kmem::dtr {

class Candidates {
 public:
  Candidates(bool sample, uint64_t seed) : sample_(sample), generator_(seed) {}

  bool Contains(const Storage& storage) const {
    return storage.position != Storage::kNoPosition;
  }

  void Insert(Storage& storage) {
    storage.position = storages_.size();
    storages_.push_back(&storage);
  }

  void Erase(Storage& storage) {
    storages_[storage.position] = storages_.back();
    storages_[storage.position]->position = storage.position;
    storages_.pop_back();
    storage.position = Storage::kNoPosition;
  }

  // The one with the lowest score, or nullptr if there is none.
  Storage* Choose(Heuristic& heuristic, int64_t now) {
    const size_t count = storages_.size();
    const size_t num_looks =
        sample_ ? static_cast<size_t>(std::ceil(std::sqrt(count))) : count;
    Storage* best = nullptr;
    double best_score = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < num_looks; ++i) {
      Storage* storage = storages_[sample_ ? generator_() % count : i];
      const double score =
          WouldBeMissed(*storage)
              ? heuristic.Score(*storage, now)
              : -1 / static_cast<double>(now - storage->last_used + 1);
      if (best == nullptr || score < best_score) {
        best = storage;
        best_score = score;
      }
    }
    return best;
  }

  // What a storage weighs among those that have to go together: its score for
  // each of its bytes, nothing if nobody would miss it.
  double Weigh(Storage& storage, Heuristic& heuristic, int64_t now) {
    if (!WouldBeMissed(storage)) return 0;
    return heuristic.Score(storage, now) * static_cast<double>(storage.bytes);
  }

  const std::vector<Storage*>& storages() const { return storages_; }

  // How many storages were looked at for this, besides the heuristic's.
  int64_t num_accesses() const { return num_accesses_; }

 private:
  bool WouldBeMissed(const Storage& storage) {
    if (storage.handles > 0) return true;
    bool missed = false;
    VisitChildren(storage, [&](const Storage& child) {
      ++num_accesses_;
      missed = missed || !child.resident;
    });
    return missed;
  }

  const bool sample_;
  std::mt19937_64 generator_;
  std::vector<Storage*> storages_;
  int64_t num_accesses_ = 0;
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_CANDIDATES_H_
