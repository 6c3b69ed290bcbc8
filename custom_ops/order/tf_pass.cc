// Runs a step's operations one after another, in the order of their trace.
//
// An executor starts whatever is ready, on as many threads as there are. Which
// arrays are held at a time, and so the peak, depends on threads then: in a
// chain of convolutions by half of it. Here each operation waits for the one
// before it. TensorFlow has joined what it joins by now, so that no bit of a
// result depends on the order.
//
// Only places that follow from what operations read are used: so there is no
// cycle. A graph of several devices is left alone. An operation that was made
// since the trace comes right after what it reads. What runs within one branch,
// or one iteration of a loop, is in an order of its own. Collective operations
// go on beside others.

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "places.h"
#include "tensorflow/core/common_runtime/optimization_registry.h"
#include "tensorflow/core/graph/control_flow.h"
#include "tensorflow/core/graph/graph.h"

namespace kmem {
namespace {

using tensorflow::Edge;
using tensorflow::Graph;
using tensorflow::Node;

// The graph of an operation, as `KeepPlaces` numbered it. Its place is not an
// attribute: TensorFlow merges only what has the same ones.
constexpr char kGraph[] = "_kmem_graph";
// By so much an operation comes before who reads it, if it has no place so
// early, and by half as much after what it reads, if it has no place at all.
// More of them follow one another than TensorFlow ever makes of an operation.
constexpr double kNext = 1.0 / 4096;
constexpr double kNone = -1;
constexpr double kNever = std::numeric_limits<double>::max();

// The conditions, and what they have to be, for an operation to run.
using Branch = std::set<std::pair<int, int>>;

// Where the names of a traced graph are found in the one that runs: functions
// are written out in place of their calls, with a prefix.
struct Traced {
  std::shared_ptr<const Places> places;
  std::set<std::string> prefixes;
};

class Order {
 public:
  explicit Order(Graph* graph) : graph_(graph) {}

  absl::Status Run() {
    FindTraced();
    if (traced_.empty()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(
        tensorflow::BuildControlFlowInfo(graph_, &frames_, nullptr));
    const std::vector<Node*> nodes = Sorted();
    FindReaders(nodes);
    before_.assign(graph_->num_node_ids(), kNone);
    branches_.resize(graph_->num_node_ids());
    for (Node* node : nodes) Visit(node);
    for (auto& [key, row] : rows_) Chain(&row);
    return absl::OkStatus();
  }

 private:
  using Row = std::vector<std::pair<double, Node*>>;

  void FindTraced() {
    for (const Node* node : graph_->op_nodes()) {
      int64_t number;
      if (!TryGetNodeAttr(node->attrs(), kGraph, &number)) continue;
      Traced& traced = traced_[number];
      if (traced.places == nullptr) traced.places = PlacesOf(number);
      if (traced.places == nullptr) continue;
      for (const auto& [prefix, name] : Splits(node->name())) {
        if (traced.places->count(name) == 0) continue;
        traced.prefixes.insert(prefix);
        break;
      }
    }
  }

  static std::vector<std::pair<std::string, std::string>> Splits(
      const std::string& name) {
    std::vector<std::pair<std::string, std::string>> splits = {{"", name}};
    for (size_t i = name.find('/'); i != std::string::npos;
         i = name.find('/', i + 1)) {
      splits.emplace_back(name.substr(0, i), name.substr(i + 1));
    }
    return splits;
  }

  // Each operation after what it reads, and what leaves a loop after all that
  // enters it.
  std::vector<Node*> Sorted() const {
    std::vector<int> waiting(graph_->num_node_ids(), 0);
    std::unordered_map<std::string, int> num_entries;
    std::unordered_map<std::string, std::vector<Node*>> exits;
    for (Node* node : graph_->nodes()) {
      for (const Edge* edge : node->in_edges()) {
        waiting[node->id()] += !edge->src()->IsNextIteration();
      }
      if (node->IsEnter()) ++num_entries[FrameOf(node)];
      if (node->IsExit()) exits[FrameOf(node)].push_back(node);
    }
    for (const auto& [frame, nodes] : exits) {
      for (Node* node : nodes) waiting[node->id()] += num_entries[frame];
    }
    std::vector<Node*> ready;
    for (Node* node : graph_->nodes()) {
      if (waiting[node->id()] == 0) ready.push_back(node);
    }
    std::vector<Node*> sorted;
    while (!ready.empty()) {
      Node* node = ready.back();
      ready.pop_back();
      sorted.push_back(node);
      std::vector<Node*> next;
      if (node->IsEnter()) next = exits[FrameOf(node)];
      if (!node->IsNextIteration()) {
        for (const Edge* edge : node->out_edges()) next.push_back(edge->dst());
      }
      for (Node* reader : next) {
        if (--waiting[reader->id()] == 0) ready.push_back(reader);
      }
    }
    return sorted;
  }

  // TensorFlow keeps one of several operations that are equal, under any of
  // their names: it may be read earlier than it was traced.
  void FindReaders(const std::vector<Node*>& sorted) {
    read_.assign(graph_->num_node_ids(), kNever);
    for (auto it = sorted.rbegin(); it != sorted.rend(); ++it) {
      const Node* node = *it;
      // Places are others outside of a loop.
      if (node->IsEnter() || node->IsExit()) continue;
      double& read = read_[node->id()];
      for (const Edge* edge : node->out_edges()) {
        read = std::min(read, read_[edge->dst()->id()] - kNext);
      }
      const double place = OwnPlaceOf(node);
      if (place != kNone) read = std::min(read, place);
    }
  }

  void Visit(Node* node) {
    double before = kNone;
    std::vector<Branch> sources;
    for (const Edge* edge : node->in_edges()) {
      const Node* source = edge->src();
      if (source->IsNextIteration()) continue;
      before = std::max(before, before_[source->id()]);
      sources.push_back(branches_[source->id()]);
      if (source->IsSwitch() && !edge->IsControlEdge()) {
        sources.back().insert({ConditionOf(source), edge->src_output()});
      }
    }
    branches_[node->id()] = Joined(sources, node->IsMerge());
    if (node->IsEnter()) {
      // A place is one of its own within a loop.
      double& entered = entered_[FrameOf(node)];
      entered = std::max(entered, before);
      before = kNone;
    }
    if (node->IsExit()) before = entered_[FrameOf(node)];
    before_[node->id()] = before;
    if (!Runs(node)) return;
    double place = OwnPlaceOf(node);
    if (place != kNone) place = std::min(place, read_[node->id()]);
    if (place == kNone && before != kNone) place = before + kNext / 2;
    if (place <= before) return;
    before_[node->id()] = place;
    rows_[{FrameOf(node), branches_[node->id()]}].push_back({place, node});
  }

  // Every array that enters a branch has a `Switch` of its own.
  static int ConditionOf(const Node* branching) {
    const Node* condition;
    TF_CHECK_OK(branching->input_node(1, &condition));
    return condition->id();
  }

  static Branch Joined(const std::vector<Branch>& sources, bool merged) {
    Branch joined;
    if (sources.empty()) return joined;
    joined = sources[0];
    for (const Branch& source : sources) {
      if (!merged) {
        joined.insert(source.begin(), source.end());
        continue;
      }
      Branch both;
      std::set_intersection(joined.begin(), joined.end(), source.begin(),
                            source.end(), std::inserter(both, both.end()));
      joined = std::move(both);
    }
    return joined;
  }

  double OwnPlaceOf(const Node* node) const {
    if (!Runs(node) || IsAtOnce(node)) return kNone;
    for (const auto& [number, traced] : traced_) {
      if (traced.places == nullptr) continue;
      for (const auto& [prefix, name] : Splits(node->name())) {
        if (traced.prefixes.count(prefix) == 0) continue;
        const auto found = traced.places->find(name);
        if (found != traced.places->end()) return found->second;
      }
    }
    return kNone;
  }

  // What passes an array on, or asks for its shape, would hold it until its
  // turn. It comes right after what it reads; and what is next waits for it,
  // as it could not take over the memory of an array that another one holds.
  static bool IsAtOnce(const Node* node) {
    static const auto* const kAtOnce = new std::set<std::string>{
        "ExpandDims",     "Identity", "IdentityN", "Rank", "ReadVariableOp",
        "Reshape",        "Shape",    "ShapeN",    "Size", "Squeeze",
    };
    return kAtOnce->count(node->type_string()) > 0;
  }

  static bool Runs(const Node* node) {
    return node->IsOp() && !node->IsControlFlow() && !node->IsConstant() &&
           !node->IsArg() && !node->IsRetval() && !node->IsCollective() &&
           node->type_string() != "NoOp";
  }

  void Chain(Row* row) {
    std::stable_sort(
        row->begin(), row->end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 1; i < row->size(); ++i) {
      graph_->AddControlEdge((*row)[i - 1].second, (*row)[i].second);
    }
  }

  const std::string& FrameOf(const Node* node) const {
    return frames_[node->id()].frame_name;
  }

  Graph* const graph_;
  std::map<int64_t, Traced> traced_;
  std::vector<tensorflow::ControlFlowInfo> frames_;
  // By number of the operation: the place of the last one that it waits for,
  // or its own, and the branch in which it runs.
  std::vector<double> before_;
  std::vector<Branch> branches_;
  // The same: the place of the first one that reads it, less a little, or its
  // own if that is earlier.
  std::vector<double> read_;
  // By loop: the place of the last operation that it waits for.
  std::unordered_map<std::string, double> entered_;
  std::map<std::pair<std::string, Branch>, Row> rows_;
};

class InOneOrder : public tensorflow::GraphOptimizationPass {
 public:
  absl::Status Run(
      const tensorflow::GraphOptimizationPassOptions& options) override {
    // Devices that wait for each other could not tell whose turn it is.
    if (options.partition_graphs == nullptr ||
        options.partition_graphs->size() != 1) {
      return absl::OkStatus();
    }
    return Order(options.partition_graphs->begin()->second.get()).Run();
  }
};

// After TensorFlow's own.
REGISTER_OPTIMIZATION(tensorflow::OptimizationPassRegistry::POST_PARTITIONING,
                      1 << 20, InOneOrder);

}  // namespace
}  // namespace kmem
