#include "dtr/timing.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/check.h"

namespace {

using kmem::dtr::HostStream;
using kmem::dtr::LeastTimes;
using kmem::dtr::Mark;
using kmem::dtr::Stream;
using kmem::dtr::Timing;

// A device that lags behind the host: it passes marks when the test says so,
// at a clock of its own.
class LateStream : public Stream {
 public:
  class LateMark : public Mark {
   public:
    int64_t Nanoseconds() const override { return passed; }
    int64_t passed = kNotYet;
  };

  std::shared_ptr<Mark> Put() override {
    marks.push_back(std::make_shared<LateMark>());
    return marks.back();
  }
  bool IsLate() const override { return true; }

  std::vector<std::shared_ptr<LateMark>> marks;
};

// Puts an operator into the stream, and returns what to count with.
int64_t Run(Timing* timing, const std::shared_ptr<LeastTimes>& times,
            int64_t bytes) {
  Timing::Interval interval = timing->Begin(*times);
  timing->End(&interval);
  return timing->Nanoseconds(interval, times, bytes);
}

void TheHostKnowsEveryTimeAtOnce() {
  HostStream stream;
  Timing timing(&stream);
  const auto times = std::make_shared<LeastTimes>();
  for (int i = 0; i < 1000; ++i) {
    const int64_t before = times->Of(8);
    const int64_t counted = Run(&timing, times, 8);
    CHECK_EQUAL(times->num_timed(), i + 1);
    CHECK_EQUAL(counted, times->Of(8));
    CHECK_TRUE(before == LeastTimes::kUnknown || counted <= before);
    CHECK_EQUAL(timing.num_waiting(), 0);
  }
}

void ALateTimeCountsFromWhenItIsKnown() {
  LateStream stream;
  Timing timing(&stream);
  const auto times = std::make_shared<LeastTimes>();
  // The host was not long at it: the device will be.
  constexpr int64_t kLong = int64_t{3600} * 1000000000;
  CHECK_TRUE(Run(&timing, times, 8) < kLong);
  stream.marks[0]->passed = 500;
  CHECK_TRUE(Run(&timing, times, 8) < kLong);  // It is being worked at.
  CHECK_EQUAL(times->Of(8), LeastTimes::kUnknown);
  stream.marks[1]->passed = 500 + kLong;
  CHECK_EQUAL(Run(&timing, times, 8), kLong);
  // Of another size nothing is known.
  CHECK_TRUE(Run(&timing, times, 16) < kLong);
  CHECK_EQUAL(timing.num_waiting(), 3);
}

void TimesMayBecomeKnownInAnyOrder() {
  LateStream stream;
  Timing timing(&stream);
  const auto one = std::make_shared<LeastTimes>();
  const auto other = std::make_shared<LeastTimes>();
  Run(&timing, one, 8);    // Marks 0 and 1.
  Run(&timing, other, 8);  // 2 and 3.
  Run(&timing, one, 8);    // 4 and 5.
  stream.marks[4]->passed = 70;
  stream.marks[5]->passed = 90;
  Run(&timing, other, 8);  // 6 and 7.
  CHECK_EQUAL(one->Of(8), 20);
  CHECK_EQUAL(other->Of(8), LeastTimes::kUnknown);
  stream.marks[0]->passed = 10;
  stream.marks[1]->passed = 15;
  stream.marks[2]->passed = 15;
  stream.marks[3]->passed = 45;
  CHECK_EQUAL(Run(&timing, other, 8), 30);
  CHECK_EQUAL(one->Of(8), 5);  // The least, not the last.
}

void FewOfAKindAreTimed() {
  LateStream stream;
  Timing timing(&stream);
  const auto times = std::make_shared<LeastTimes>();
  for (int i = 0; i < 10 * Timing::kMostOfAKind; ++i) {
    Run(&timing, times, 8);
    for (const auto& mark : stream.marks) mark->passed = 1;
  }
  CHECK_TRUE(static_cast<int64_t>(stream.marks.size()) <=
             2 * (Timing::kMostOfAKind + 1));
  CHECK_EQUAL(Run(&timing, times, 8), 0);
}

// However far the device lags behind, what is waited for has an end.
void ADeviceThatNeverAnswersIsNotWaitedFor() {
  LateStream stream;
  Timing timing(&stream);
  for (int i = 0; i < 3000; ++i) {
    Run(&timing, std::make_shared<LeastTimes>(), 8);
  }
  CHECK_EQUAL(timing.num_waiting(), Timing::kMostWaiting);
}

}  // namespace

int main() {
  TheHostKnowsEveryTimeAtOnce();
  ALateTimeCountsFromWhenItIsKnown();
  TimesMayBecomeKnownInAnyOrder();
  FewOfAKindAreTimed();
  ADeviceThatNeverAnswersIsNotWaitedFor();
  return 0;
}
