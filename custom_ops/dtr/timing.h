// How long operators take, on a device that may run them after they return.
//
// A stream is what a device works off, in order. The host puts marks into it,
// before an operator and behind it, and asks later on when the device passed
// them: it never waits. Until that is known an operator is taken to last as
// long as those of its kind and size did, or, if none has been timed, as long
// as the host was busy with it. A device that is the host has passed a mark as
// soon as it is put, so that every operator is timed at once.
//
// What is evicted needs no wait either: memory that is given back goes to
// operators that come behind in the stream.
//
// Plain C++17, no TensorFlow.

#ifndef KMEM_DTR_TIMING_H_
#define KMEM_DTR_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace kmem::dtr {

// A point in a stream. Its maker knows when the device passed it.
class Mark {
 public:
  static constexpr int64_t kNotYet = -1;

  virtual ~Mark() = default;
  // The device's clock then, or kNotYet.
  virtual int64_t Nanoseconds() const = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  // Behind all that is in the stream.
  virtual std::shared_ptr<Mark> Put() = 0;
  // Whether a mark costs so much that few operators of a kind should be timed.
  virtual bool IsLate() const = 0;
};

inline int64_t HostNanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The least times of operators of one kind, by the bytes of their operands: the
// first time, and on a busy machine, it takes longer.
class LeastTimes {
 public:
  static constexpr int64_t kUnknown = -1;

  void Learn(int64_t bytes, int64_t nanoseconds) {
    int64_t& least = least_.emplace(bytes, nanoseconds).first->second;
    least = std::min(least, nanoseconds);
    ++num_timed_;
  }

  int64_t Of(int64_t bytes) const {
    const auto found = least_.find(bytes);
    return found == least_.end() ? kUnknown : found->second;
  }

  int64_t num_timed() const { return num_timed_; }

 private:
  std::unordered_map<int64_t, int64_t> least_;
  int64_t num_timed_ = 0;
};

// For one thread at a time.
class Timing {
 public:
  // On a stream that is late: of each kind so many are timed, and so many are
  // waited for together.
  static constexpr int64_t kMostOfAKind = 32;
  static constexpr size_t kMostWaiting = 1024;

  // An operator that has been put into the stream.
  struct Interval {
    std::shared_ptr<Mark> begin;  // nullptr if it is not timed.
    std::shared_ptr<Mark> end;
    int64_t host_begin = 0;
    int64_t host_nanoseconds = 0;
  };

  // The stream must outlive it.
  explicit Timing(Stream* stream) : stream_(stream) {}

  // Before an operator of a kind, and behind it.
  Interval Begin(const LeastTimes& times) {
    Interval interval;
    const bool is_timed =
        !stream_->IsLate() || (times.num_timed() < kMostOfAKind &&
                               waiting_.size() < kMostWaiting);
    if (is_timed) interval.begin = stream_->Put();
    interval.host_begin = HostNanoseconds();
    return interval;
  }
  void End(Interval* interval) {
    interval->host_nanoseconds = HostNanoseconds() - interval->host_begin;
    if (interval->begin != nullptr) interval->end = stream_->Put();
  }

  // What to count with for an operator whose operands have so many bytes.
  int64_t Nanoseconds(const Interval& interval,
                      const std::shared_ptr<LeastTimes>& times,
                      int64_t bytes) {
    if (interval.begin != nullptr) {
      waiting_.push_back({interval.begin, interval.end, times, bytes});
    }
    Collect();
    const int64_t least = times->Of(bytes);
    return least == LeastTimes::kUnknown ? interval.host_nanoseconds : least;
  }

  // The time of one that is not remembered.
  static int64_t Known(const Interval& interval) {
    const int64_t nanoseconds =
        interval.begin == nullptr ? Mark::kNotYet
                                  : Between(*interval.begin, *interval.end);
    return nanoseconds == Mark::kNotYet ? interval.host_nanoseconds
                                        : nanoseconds;
  }

  size_t num_waiting() const { return waiting_.size(); }

 private:
  struct Waiting {
    std::shared_ptr<Mark> begin;
    std::shared_ptr<Mark> end;
    std::shared_ptr<LeastTimes> times;
    int64_t bytes;
  };

  static int64_t Between(const Mark& begin, const Mark& end) {
    const int64_t first = begin.Nanoseconds(), last = end.Nanoseconds();
    if (first == Mark::kNotYet || last == Mark::kNotYet) return Mark::kNotYet;
    return std::max<int64_t>(last - first, 0);
  }

  // Learns from what the device has done since. In whatever order it tells.
  void Collect() {
    const auto is_known = [](const Waiting& one) {
      const int64_t nanoseconds = Between(*one.begin, *one.end);
      if (nanoseconds == Mark::kNotYet) return false;
      one.times->Learn(one.bytes, nanoseconds);
      return true;
    };
    waiting_.erase(std::remove_if(waiting_.begin(), waiting_.end(), is_known),
                   waiting_.end());
  }

  Stream* const stream_;
  std::vector<Waiting> waiting_;
};

// The host as a device.
class HostStream : public Stream {
 public:
  std::shared_ptr<Mark> Put() override {
    return std::make_shared<Now>(HostNanoseconds());
  }
  bool IsLate() const override { return false; }

 private:
  class Now : public Mark {
   public:
    explicit Now(int64_t nanoseconds) : nanoseconds_(nanoseconds) {}
    int64_t Nanoseconds() const override { return nanoseconds_; }

   private:
    const int64_t nanoseconds_;
  };
};

}  // namespace kmem::dtr

#endif  // KMEM_DTR_TIMING_H_
