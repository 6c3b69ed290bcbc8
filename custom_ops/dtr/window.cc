#include "window.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace kmem::dtr {
namespace {

// A span with the occupants that lie in it: more than one if an operator has
// made several tensors in one block.
struct Place {
  int64_t bytes;
  bool can_be_free;
  double weight;
  size_t first;  // Of its occupants,
  size_t last;   // and the one after them.
};

std::vector<Place> PlacesOf(const std::vector<Span>& layout,
                            const std::vector<Occupant>& occupants) {
  std::vector<Place> places;
  size_t next = 0;
  for (const Span& span : layout) {
    // Beside the pool.
    while (next < occupants.size() &&
           occupants[next].storage->address < span.start) {
      ++next;
    }
    Place place = {span.bytes, span.is_free, 0, next, next};
    while (next < occupants.size() &&
           occupants[next].storage->address < span.start + span.bytes) {
      place.can_be_free = true;
      place.weight += occupants[next].weight;
      place.last = ++next;
    }
    places.push_back(place);
  }
  return places;
}

}  // namespace

std::vector<Storage*> CheapestWindow(const std::vector<Span>& layout,
                                     std::vector<Occupant> occupants,
                                     int64_t bytes) {
  bytes = Pool::Round(bytes);
  std::sort(occupants.begin(), occupants.end(),
            [](const Occupant& one, const Occupant& other) {
              return one.storage->address < other.storage->address;
            });
  const std::vector<Place> places = PlacesOf(layout, occupants);
  double least = std::numeric_limits<double>::infinity();
  size_t best_first = 0, best_last = 0;
  // The window's places, and what is in it.
  size_t first = 0;
  int64_t held = 0;
  double weight = 0;
  for (size_t last = 0; last < places.size(); ++last) {
    if (!places[last].can_be_free) {
      first = last + 1;
      held = 0;
      weight = 0;
      continue;
    }
    held += places[last].bytes;
    weight += places[last].weight;
    // As short as it can be.
    while (held - places[first].bytes >= bytes) {
      held -= places[first].bytes;
      weight -= places[first].weight;
      ++first;
    }
    if (held >= bytes && weight < least) {
      least = weight;
      best_first = first;
      best_last = last + 1;
    }
  }
  std::vector<Storage*> window;
  for (size_t i = best_first; i < best_last; ++i) {
    for (size_t j = places[i].first; j < places[i].last; ++j) {
      window.push_back(occupants[j].storage);
    }
  }
  return window;
}

}  // namespace kmem::dtr
