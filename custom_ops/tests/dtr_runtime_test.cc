#include "dtr/runtime.h"

#include <cstdint>
#include <string>
#include <vector>

#include "tests/dtr_fixture.h"

namespace {

using kmem::dtr::Code;
using kmem::dtr::Options;
using kmem::dtr::Session;
using kmem::dtr::Statistics;
using kmem::dtr::Tensor;
using kmem::dtr::Threshold;

void EvictAll(Session* session) {
  while (session->runtime.Evict()) {
  }
}

void WhatNobodyHoldsIsDroppedAndMadeAgainWhenRead() {
  Session session;
  Tensor* x = session.MakeSource(8);
  Tensor* a = session.Make({x}, 100);
  Tensor* b = session.Make({a}, 10);
  const int64_t number = session.Read(b);
  session.Release({a});
  CHECK_TRUE(!a->defined);
  CHECK_EQUAL(session.driver.bytes, 18);
  CHECK_TRUE(session.runtime.Evict());
  CHECK_EQUAL(session.driver.bytes, 8);
  CHECK_EQUAL(session.Read(b), number);
  CheckOrder(session, {1, 2});
}

void WhatWasMadeAgainStaysUntilRoomIsNeeded() {
  Session session(Threshold(130));
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 50);
  Tensor* b = session.Make({a}, 20);
  session.Release({a});
  CHECK_TRUE(session.runtime.Evict());
  session.Read(b);
  CHECK_TRUE(a->defined);
  CHECK_EQUAL(session.driver.bytes, 80);
  // `a` goes first: all that it was needed for is there.
  Tensor* c = session.Make({x}, 60);
  CHECK_TRUE(!a->defined && b->defined && c->defined);
  CHECK_EQUAL(session.driver.bytes, 90);
}

void WhatNothingDependsOnIsForgotten() {
  Session session;
  Tensor* x = session.MakeSource(8);
  Tensor* a = session.Make({x}, 4);
  Tensor* b = session.Make({a}, 4);
  session.Release({x, a});
  CHECK_EQUAL(session.runtime.statistics().num_operators, 3);
  session.Release({b});
  CHECK_EQUAL(session.runtime.statistics().num_operators, 0);
  CHECK_EQUAL(session.driver.bytes, 0);
  CHECK_TRUE(session.driver.values.empty());
}

void AnOperatorWithoutOutputsIsNotRemembered() {
  Session session;
  Tensor* x = session.MakeSource(8);
  CHECK_TRUE(session.Run({x}, {}).empty());
  CHECK_TRUE(x->readers.empty());
  CHECK_EQUAL(session.runtime.statistics().num_operators, 1);
  CHECK_EQUAL(session.runtime.statistics().total_nanoseconds, 1);
}

void EvictionEndsAsSoonAsTheRequestFits() {
  Session session(Threshold(100));
  Tensor* x = session.MakeSource(10);
  Tensor* cheap = session.Make({x}, 30, 1);
  Tensor* middle = session.Make({x}, 30, 10);
  Tensor* dear = session.Make({x}, 30, 100);
  CHECK_TRUE(session.Make({x}, 50, 10) != nullptr);
  CHECK_TRUE(!cheap->defined && !middle->defined && dear->defined);
  CHECK_EQUAL(session.driver.bytes, 90);
  CHECK_EQUAL(session.runtime.statistics().num_evictions, 2);
  CHECK_EQUAL(session.runtime.statistics().peak_bytes, 100);
}

// Ten tensors in a row, of which the last is read, then all before it: what
// is in memory is worth starting from.
void TheOrderOfRecomputationIsThatOfTheGraph() {
  Session session(Threshold(40), "lru");
  std::vector<Tensor*> chain = {session.MakeSource(10)};
  for (int i = 0; i < 6; ++i) chain.push_back(session.Make({chain[i]}, 10));
  // In memory: the source and the last three.
  CHECK_TRUE(!chain[3]->defined && chain[4]->defined && chain[6]->defined);
  session.Read(chain[2]);
  CheckOrder(session, {1, 2});
  session.Read(chain[3]);
  CheckOrder(session, {1, 2, 3});
  CHECK_EQUAL(session.runtime.statistics().num_recomputations, 3);
  CHECK_EQUAL(session.runtime.statistics().peak_bytes, 40);
}

void AChainOfTenThousandIsMadeAgainWithoutRecursion() {
  Session session;
  Tensor* first = session.MakeSource(1);
  Tensor* last = first;
  for (int i = 0; i < 10000; ++i) {
    Tensor* next = session.Make({last}, 1);
    if (last != first) session.Release({last});
    last = next;
  }
  const int64_t number = session.Read(last);
  EvictAll(&session);
  CHECK_EQUAL(session.driver.bytes, 1);
  CHECK_EQUAL(session.Read(last), number);
  CHECK_EQUAL(session.runtime.statistics().num_recomputations, 10000);
  session.Release({first, last});
  CHECK_EQUAL(session.runtime.statistics().num_operators, 0);
}

void AViewHasNoBytesAndGoesWithItsStorage() {
  Session session;
  Tensor* x = session.MakeSource(8);
  Tensor* a = session.Make({x}, 100);
  Tensor* view = session.View(a);
  Tensor* view_of_view = session.View(view);
  const int64_t number = session.Read(view_of_view);
  CHECK_EQUAL(session.driver.bytes, 108);
  session.Release({a, view});
  CHECK_TRUE(a->defined);  // The storage is still held.
  CHECK_TRUE(session.runtime.Evict());
  CHECK_TRUE(!a->defined && !view_of_view->defined);
  CHECK_EQUAL(session.driver.bytes, 8);
  CHECK_EQUAL(session.Read(view_of_view), number);
  CheckOrder(session, {1, 2, 3});
  session.Release({view_of_view});
  CHECK_EQUAL(session.driver.bytes, 8);
}

void SiblingsThatAreThereAreMadeTwiceForAMoment() {
  Session session;
  Tensor* x = session.MakeSource(8);
  const auto made = session.Run({x}, {{100}, {30}});
  Tensor* reader = session.Make({made[0]}, 1);
  session.Release({made[0]});  // Dropped; its sibling stays.
  CHECK_EQUAL(session.driver.bytes, 39);
  session.runtime.Evict();  // The sibling: the cheapest for its bytes.
  CHECK_TRUE(!made[1]->defined && reader->defined);
  session.Read(made[1]);
  // The first output came along, is wanted by its reader, and stays.
  CHECK_EQUAL(session.driver.bytes, 139);
  CHECK_EQUAL(session.runtime.statistics().peak_bytes, 139);
  session.Release({reader});
  CHECK_TRUE(!made[0]->defined);  // Now nothing wants it.
  session.runtime.Evict();
  session.Read(made[1]);
  CHECK_TRUE(!made[0]->defined && made[1]->defined);
  CHECK_EQUAL(session.driver.bytes, 38);
}

void WhatIsBeingReadStays() {
  Session session(Threshold(100));
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 40);
  Tensor* b = session.Make({x}, 40);
  CHECK_TRUE(session.Make({a, b}, 20) == nullptr);
  CHECK_TRUE(a->defined && b->defined);
  CHECK_EQUAL(a->storage->locks, 0);
  CHECK_EQUAL(a->handles, 1);
}

void NoRoomNamesTheSmallestThreshold() {
  Session session(Threshold(100));
  Tensor* x = session.MakeSource(60);
  Tensor* a = session.Make({x}, 30);
  CHECK_TRUE(session.Make({x}, 45) == nullptr);
  CHECK_TRUE(session.status.code == Code::kNoRoom);
  CHECK_TRUE(session.status.message ==
             "The threshold must be at least 105 bytes: nothing is left to "
             "evict, 60 bytes are in use, of which 60 cannot be made again, "
             "and 45 are asked for. Received: 100");
  const Statistics statistics = session.runtime.statistics();
  CHECK_EQUAL(statistics.least_threshold_bytes, 105);
  CHECK_EQUAL(statistics.pinned_bytes, 60);
  session.runtime.set_threshold_bytes(105);
  CHECK_TRUE(session.Make({x}, 45) != nullptr);
  session.Read(a);
  CHECK_TRUE(session.status.ok());
}

void WhatIsNotPureNeverRunsAgain() {
  Session session(Threshold(100));
  Tensor* x = session.MakeSource(10);
  Tensor* drawn = session.Run({x}, {{50}}, 1, false)[0];
  session.Release({x});  // It is not kept for an operator that does not run.
  CHECK_EQUAL(session.driver.bytes, 50);
  CHECK_TRUE(!session.runtime.Evict());
  Tensor* reader = session.Make({drawn}, 10);
  session.Release({drawn});
  CHECK_TRUE(drawn->defined);
  CHECK_TRUE(session.Make({}, 60) == nullptr);
  session.Release({reader});
  CHECK_TRUE(session.Make({}, 60) != nullptr);
}

void SmallStoragesGoLast() {
  Options options = Threshold(100);
  options.evictee_minimum_bytes = 20;
  Session session(options);
  Tensor* x = session.MakeSource(10);
  Tensor* small = session.Make({x}, 19);
  Tensor* large = session.Make({x}, 20);
  Tensor* larger = session.Make({x}, 60);
  CHECK_TRUE(small->defined && !large->defined);
  session.runtime.Retain(larger);
  CHECK_TRUE(session.runtime.Lock({larger}).ok());
  CHECK_TRUE(session.Make({x}, 30) != nullptr);
  CHECK_TRUE(!small->defined && larger->defined);
  session.runtime.Unlock({larger});
}

void AnOperatorThatFailsLeavesEveryCountRight() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 10);
  Tensor* b = session.Make({a}, 10);
  Tensor* c = session.Make({a, b}, 10);
  const int64_t number = session.Read(c);
  EvictAll(&session);
  session.driver.fails = 2;
  CHECK_EQUAL(session.Read(c), -1);
  CHECK_TRUE(session.status.code == Code::kOperatorFailed);
  CHECK_TRUE(session.status.message == "broken");
  CheckOrder(session, {1});
  for (const Tensor* tensor : {x, a, b, c}) {
    CHECK_EQUAL(tensor->storage->locks, 0);
    CHECK_EQUAL(tensor->handles, 1);
  }
  CHECK_EQUAL(session.runtime.live_bytes(), session.driver.bytes);
  session.driver.fails = -1;
  CHECK_EQUAL(session.Read(c), number);
  session.Release({x, a, b, c});
  CHECK_EQUAL(session.driver.bytes, 0);
}

void RecomputationHasALimit() {
  Options options;
  options.recomputation_limit = 25;
  Session session(options);
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 10, 10);
  for (int i = 0; i < 2; ++i) {
    CHECK_TRUE(session.runtime.Evict());
    session.Read(a);
    CHECK_TRUE(session.status.ok());
  }
  CHECK_TRUE(session.runtime.Evict());
  CHECK_EQUAL(session.Read(a), -1);
  CHECK_TRUE(session.status.code == Code::kTooMuchRecomputation);
  CHECK_TRUE(session.status.message.find("It has taken 20 ns, the limit is 25 "
                                         "ns.") != std::string::npos);
  CHECK_TRUE(session.status.message.find("heuristic=\"ancestors\"") !=
             std::string::npos);
  CHECK_EQUAL(session.runtime.statistics().recomputed_nanoseconds, 20);
  session.runtime.set_recomputation_limit(30);
  session.Read(a);
  CHECK_TRUE(session.status.ok());
}

void AnInputGivesWayToWhatIsMadeForTheSameOperator() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* one = session.Make({x}, 40);
  Tensor* large = session.Make({x}, 60);
  Tensor* other = session.Make({large}, 10);
  Tensor* sum = session.Make({one, other}, 5);
  EvictAll(&session);
  session.Read(one);
  session.driver.order.clear();
  session.runtime.set_threshold_bytes(100);
  CHECK_TRUE(session.Read(sum) > 0);
  CheckOrder(session, {2, 3, 1, 4});
  CHECK_EQUAL(one->storage->locks + large->storage->locks, 0);
}

void InputsDoNotGiveWayToEachOtherForEver() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* one = session.Make({session.Make({x}, 60)}, 40);
  Tensor* other = session.Make({session.Make({x}, 60)}, 45);
  Tensor* sum = session.Make({one, other}, 5);
  EvictAll(&session);
  session.runtime.set_threshold_bytes(120);
  CHECK_EQUAL(session.Read(sum), -1);
  CHECK_TRUE(session.status.code == Code::kNoRoom);
  CHECK_EQUAL(one->storage->locks + other->storage->locks, 0);
  EvictAll(&session);
  CHECK_EQUAL(session.driver.bytes, 10);
  session.runtime.set_threshold_bytes(160);
  CHECK_TRUE(session.Read(sum) > 0);
}

void AHandleMayGoWhileItsTensorIsRead() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 10);
  CHECK_TRUE(session.runtime.Lock({a, a}).ok());
  session.Release({a});
  CHECK_TRUE(a->defined);
  session.runtime.Unlock({a, a});
  CHECK_EQUAL(session.driver.bytes, 10);
  CHECK_EQUAL(session.runtime.statistics().num_operators, 1);
}

void WhatIsSettledStandsOnItsOwn() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 20);
  Tensor* b = session.Make({a}, 5);
  const int64_t number = session.Read(b);
  session.Release({x, a});
  CHECK_TRUE(session.runtime.Evict());
  CHECK_TRUE(session.runtime.Settle(b).ok());
  CHECK_EQUAL(session.driver.bytes, 5);
  CHECK_EQUAL(session.runtime.statistics().num_operators, 1);
  CHECK_TRUE(!session.runtime.Evict());
  CHECK_EQUAL(session.Read(b), number);
  session.Release({b});
  CHECK_EQUAL(session.driver.bytes, 0);
}

// What a device does before a variable changes: its value is in what was
// computed so far, and nothing may compute with it later.
void NothingNeedsASourceWhoseReadersAreSettled() {
  Session session;
  Tensor* old_value = session.MakeSource(10);
  Tensor* other = session.MakeSource(10);
  Tensor* a = session.Make({old_value}, 10);
  Tensor* gradient = session.Make({a, other}, 10);
  Tensor* loss = session.Make({gradient}, 1);
  Tensor* apart = session.Make({other}, 10);
  const int64_t number = session.Read(loss);
  session.Release({a});
  EvictAll(&session);
  session.Release({gradient});
  CHECK_TRUE(session.runtime.SettleReaders(old_value).ok());
  CHECK_TRUE(old_value->readers.empty());
  CHECK_TRUE(loss->defined && !apart->defined);
  session.Release({old_value});
  CHECK_EQUAL(session.runtime.live_bytes(), 11);  // `other` and `loss`.
  CHECK_EQUAL(session.Read(loss), number);
  CHECK_EQUAL(session.driver.bytes, session.runtime.live_bytes());
}

// As in the backward pass of a function, which hands on a gradient and leaves
// that of a variable behind.
void NothingRunsForWhatIsSettledAsWell() {
  Session session;
  Tensor* old_value = session.MakeSource(10);
  const auto first = session.Run({old_value}, {{10}, {10}});
  Tensor* last = session.Make({first[1]}, 10);
  session.Release({first[1]});
  CHECK_TRUE(!first[1]->defined);
  CHECK_TRUE(session.runtime.SettleReaders(old_value).ok());
  CHECK_TRUE(old_value->readers.empty());
  CHECK_EQUAL(session.runtime.statistics().num_recomputations, 0);
  session.Release({first[0], last});
}

void ASettledViewKeepsItsStorage() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 20);
  Tensor* view = session.View(a);
  session.Release({x, a});
  CHECK_TRUE(session.runtime.Settle(view).ok());
  CHECK_EQUAL(session.runtime.statistics().num_operators, 1);
  CHECK_EQUAL(session.runtime.live_bytes(), 20);
  CHECK_EQUAL(session.runtime.statistics().pinned_bytes, 20);
  CHECK_TRUE(!session.runtime.Evict());
  session.Release({view});
  CHECK_EQUAL(session.runtime.live_bytes(), 0);
}

// What came along with it when it was made again for the last time.
void AnUnwantedSiblingOfWhatIsSettledKeepsNothing() {
  Session session;
  Tensor* x = session.MakeSource(8);
  Tensor* a = session.Make({x}, 20);
  const auto made = session.Run({a}, {{10}, {0, 0}});
  session.Release({a, made[1]});
  CHECK_TRUE(session.runtime.Evict());
  CHECK_TRUE(session.runtime.Settle(made[0]).ok());
  CheckOrder(session, {1, 2});
  CHECK_EQUAL(session.driver.bytes, 18);
  CHECK_EQUAL(session.runtime.live_bytes(), 18);
  CHECK_EQUAL(session.runtime.statistics().num_operators, 2);
}

void AnotherHeuristicTakesOver() {
  Session session;
  Tensor* x = session.MakeSource(10);
  Tensor* a = session.Make({x}, 10, 5);
  Tensor* b = session.Make({a}, 10, 1);
  Tensor* c = session.Make({x}, 10, 5);
  session.Make({c}, 10, 1);
  CHECK_TRUE(session.runtime.Evict());
  CHECK_TRUE(session.runtime.Evict());
  const int64_t before = session.runtime.statistics().num_accesses;
  session.runtime.Use(kmem::dtr::MakeHeuristic("ancestors", 0));
  CHECK_EQUAL(session.runtime.statistics().num_accesses >= before, true);
  EvictAll(&session);
  CHECK_EQUAL(session.driver.bytes, 10);
  CHECK_TRUE(session.Read(b) > 0);
  CHECK_TRUE(session.Read(c) > 0);
  CHECK_EQUAL(session.runtime.statistics().num_recomputations, 3);
}

}  // namespace

int main() {
  WhatNobodyHoldsIsDroppedAndMadeAgainWhenRead();
  WhatWasMadeAgainStaysUntilRoomIsNeeded();
  WhatNothingDependsOnIsForgotten();
  AnOperatorWithoutOutputsIsNotRemembered();
  EvictionEndsAsSoonAsTheRequestFits();
  TheOrderOfRecomputationIsThatOfTheGraph();
  AChainOfTenThousandIsMadeAgainWithoutRecursion();
  AViewHasNoBytesAndGoesWithItsStorage();
  SiblingsThatAreThereAreMadeTwiceForAMoment();
  WhatIsBeingReadStays();
  NoRoomNamesTheSmallestThreshold();
  WhatIsNotPureNeverRunsAgain();
  SmallStoragesGoLast();
  AnOperatorThatFailsLeavesEveryCountRight();
  RecomputationHasALimit();
  AnInputGivesWayToWhatIsMadeForTheSameOperator();
  InputsDoNotGiveWayToEachOtherForEver();
  AHandleMayGoWhileItsTensorIsRead();
  WhatIsSettledStandsOnItsOwn();
  NothingNeedsASourceWhoseReadersAreSettled();
  NothingRunsForWhatIsSettledAsWell();
  ASettledViewKeepsItsStorage();
  AnUnwantedSiblingOfWhatIsSettledKeepsNothing();
  AnotherHeuristicTakesOver();
  return 0;
}
