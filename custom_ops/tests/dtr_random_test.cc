// Programs that are drawn at random, under every heuristic: the numbers are
// those of a program with all the memory it wants, and every count is right.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/dtr_fixture.h"

namespace {

using kmem::dtr::FakeDriver;
using kmem::dtr::Options;
using kmem::dtr::Output;
using kmem::dtr::Session;
using kmem::dtr::Statistics;
using kmem::dtr::Tensor;
using kmem::dtr::Threshold;

const char* const kHeuristics[] = {"dtr_eq", "dtr",  "ancestors",
                                   "msps",   "local", "size_staleness",
                                   "lru",    "random"};

struct Held {
  Tensor* tensor;
  int64_t number;  // What its value has to be, always.
};

void CheckCounts(const Session& session) {
  CHECK_EQUAL(session.runtime.live_bytes(), session.driver.bytes);
  const Statistics statistics = session.runtime.statistics();
  CHECK_EQUAL(statistics.live_bytes, session.driver.bytes);
}

// Runs `num_steps` random operators, and lets go of everything at the end.
void RunAtRandom(Session* session, std::mt19937* random, int num_steps,
                 int64_t threshold_bytes) {
  std::vector<Held> held;
  const auto hold = [&](Tensor* tensor) {
    held.push_back({tensor, FakeDriver::ValueOf(*tensor).number});
  };
  // As when garbage is collected: any handle may go at any time.
  session->driver.while_running = [&] {
    if (held.size() < 5 || (*random)() % 8 != 0) return;
    const Held last = held.back();
    held.pop_back();
    session->Release({last.tensor});
  };
  for (int i = 0; i < 3; ++i) hold(session->MakeSource(20));
  for (int step = 0; step < num_steps; ++step) {
    const unsigned choice = (*random)() % 20;
    const size_t at = (*random)() % held.size();
    if (choice < 11) {
      std::vector<Tensor*> inputs = {held[at].tensor};
      for (unsigned i = (*random)() % 3; i > 0; --i) {
        inputs.push_back(held[(*random)() % held.size()].tensor);
      }
      std::vector<Output> outputs;
      for (unsigned i = 0; i <= (*random)() % 3; ++i) {
        Output output;
        output.bytes = (*random)() % 40;
        if ((*random)() % 5 == 0) output.view_of = 0;
        outputs.push_back(output);
      }
      const bool pure = (*random)() % 30 != 0;
      const auto made =
          session->Run(inputs, outputs, (*random)() % 10, pure);
      for (Tensor* tensor : made) hold(tensor);
    } else if (choice < 17 && held.size() > 4) {
      session->Release({held[at].tensor});
      held.erase(held.begin() + at);
    } else if (choice == 17) {
      session->runtime.Retain(held[at].tensor);
      held.push_back(held[at]);
    } else if (choice == 18 && (*random)() % 4 == 0) {
      // A handle of its own: it has to last until it is settled.
      Tensor* tensor = held[at].tensor;
      session->runtime.Retain(tensor);
      if ((*random)() % 2 == 0) {
        session->runtime.Settle(tensor);
      } else {
        session->runtime.SettleReaders(tensor);
      }
      session->Release({tensor});
    } else {
      session->driver.fails =
          (*random)() % 4 == 0 ? (*random)() % session->num_operators : -1;
      const Held read = held[at];
      const int64_t number = session->Read(read.tensor);
      session->driver.fails = -1;
      if (session->status.ok()) CHECK_EQUAL(number, read.number);
    }
    CheckCounts(*session);
  }
  CHECK_TRUE(session->runtime.statistics().peak_bytes <= threshold_bytes);
  session->driver.while_running = nullptr;
  session->runtime.set_threshold_bytes(1 << 30);
  for (const Held& each : held) {
    CHECK_EQUAL(session->Read(each.tensor), each.number);
    CHECK_EQUAL(each.tensor->storage->locks, 0);
  }
  std::shuffle(held.begin(), held.end(), *random);
  for (const Held& each : held) session->Release({each.tensor});
  CheckCounts(*session);
  CHECK_EQUAL(session->driver.bytes, 0);
  CHECK_TRUE(session->driver.values.empty());
  CHECK_EQUAL(session->runtime.statistics().num_operators, 0);
}

void NumbersAndCountsAreRightUnderEveryHeuristic() {
  for (const char* heuristic : kHeuristics) {
    int64_t num_recomputations = 0;
    for (int seed = 0; seed < 100; ++seed) {
      std::mt19937 random(seed);
      Options options = Threshold(200 + 100 * (seed % 4));
      options.sqrt_sampling = seed % 3 == 0;
      options.evictee_minimum_bytes = seed % 5 == 0 ? 10 : 0;
      options.seed = seed;
      Session session(options, heuristic);
      RunAtRandom(&session, &random, 400, options.threshold_bytes);
      num_recomputations += session.runtime.statistics().num_recomputations;
    }
    CHECK_TRUE(num_recomputations > 10000);
  }
}

// Forward and backward through layers, with what training leaves behind.
void TrainOneStep(Session* session, Tensor* weights, int num_layers,
                  int64_t bytes) {
  Tensor* batch = session->MakeSource(bytes);
  std::vector<Tensor*> activations = {batch};
  for (int i = 0; i < num_layers; ++i) {
    activations.push_back(
        session->Make({activations.back(), weights}, bytes, 10));
    CHECK_TRUE(session->status.ok());
  }
  Tensor* gradient = session->Make({activations.back()}, bytes, 1);
  for (int i = num_layers; i > 0; --i) {
    Tensor* next =
        session->Make({gradient, activations[i - 1], weights}, bytes, 20);
    CHECK_TRUE(session->status.ok());
    session->Release({gradient, activations[i]});
    gradient = next;
  }
  session->Release({gradient, batch});
}

void TwoThousandStepsLeaveNothingBehind() {
  Session session(Threshold(1000));
  Tensor* weights = session.MakeSource(100);
  for (int step = 0; step < 2000; ++step) {
    TrainOneStep(&session, weights, 10 + step % 7, 60 + step % 11);
    CHECK_EQUAL(session.driver.bytes, 100);
    CHECK_EQUAL(session.driver.values.size(), 1);
    CHECK_EQUAL(session.runtime.statistics().num_operators, 1);
  }
  const Statistics statistics = session.runtime.statistics();
  CHECK_TRUE(statistics.peak_bytes <= 1000);
  CHECK_TRUE(statistics.num_recomputations > 2000);
}

// A loss that is kept keeps what it was made from, until it is settled.
void ALossThatIsKeptIsSettledAtTheEndOfAStep() {
  Session session(Threshold(500));
  Tensor* weights = session.MakeSource(100);
  std::vector<Tensor*> losses;
  for (int step = 0; step < 20; ++step) {
    Tensor* x = session.Make({weights}, 50);
    losses.push_back(session.Make({x}, 4));
    session.Release({x});
    CHECK_TRUE(session.runtime.Settle(losses.back()).ok());
    CHECK_EQUAL(session.runtime.statistics().num_operators, 2 + step);
    CHECK_EQUAL(session.driver.bytes, 100 + 4 * (step + 1));
  }
}

}  // namespace

int main() {
  NumbersAndCountsAreRightUnderEveryHeuristic();
  TwoThousandStepsLeaveNothingBehind();
  ALossThatIsKeptIsSettledAtTheEndOfAStep();
  return 0;
}
