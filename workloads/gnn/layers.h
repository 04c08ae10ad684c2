// What the layers of a graph network compute, forward and backward, for a part of the vertices. A
// vertex's results have the same bits whichever vertices are beside it and whatever threads there
// are; what is summed over vertices (gradients of parameters, the loss) is summed block by block.
//
//   sage           h' = relu(W [h, mean of neighbours' h] + b)
//   gcn            h' = relu(W (sum over the neighbours and itself of h / sqrt(d d')) + b), d:
//   degree + 1 residual-sage  h' = h + relu(norm(W [h, mean of neighbours' h] + b)); the first
//   layer without "h +" mlp            h' = relu(W h + b): what features alone say
//
// The last layer is W [...] + b alone, and gives classes. Source: Hamilton et al. 2017, Kipf and
// Welling 2017, Ba et al. 2016 (norm, with factors and eps 1e-5).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "smartinf/base/enum_names.h"
#include "smartinf/base/thread_team.h"
#include "smartinf/graph/csr.h"
#include "smartinf/kernels/row_product.h"
#include "smartinf/plan/parameter_space.h"

namespace smartinf::workloads {

enum class Model : uint8_t { kSage, kGcn, kResidualSage, kMlp };
inline constexpr std::array<std::string_view, 4> kModelNames{"sage", "gcn", "residual-sage", "mlp"};
constexpr base::EnumNames enum_names(Model) { return kModelNames; }

struct ModelOptions {
  Model model = Model::kSage;
  uint32_t layers = 2;
  uint32_t hidden = 64;
};

struct Layer {
  Model model = Model::kSage;
  uint32_t in = 0, out = 0;
  bool last = false;
  bool residual = false;  // h +
  bool norm = false;
  // Where its parameters are among all.
  uint64_t weight = 0;  // [out][width]
  uint64_t bias = 0;    // [out]
  uint64_t factor = 0;  // [out], of the norm
  uint64_t shift = 0;   // [out], likewise
  uint64_t end = 0;     // of them all

  /// Whether the vertex's own row is beside its neighbours' mean.
  bool beside() const { return model == Model::kSage || model == Model::kResidualSage; }
  bool neighbours() const { return model != Model::kMlp; }
  uint32_t width() const { return beside() ? 2 * in : in; }
};

std::vector<Layer> layers_of(const ModelOptions& options, uint32_t features, uint32_t classes);
/// Names as torch_geometric has them where it has such: layers.0.weight...
plan::ParameterSpace space_of(std::span<const Layer> layers);
/// Weights uniform within +-sqrt(6 / (inputs + outputs)) (Glorot and Bengio 2010), factors 1, all
/// else 0. The same on every machine.
std::vector<float> initial_parameters(std::span<const Layer> layers, uint64_t seed);

/// Vertices whose rows are together in memory with those of their neighbours.
struct Part {
  /// Vertices whose gradients of parameters, and losses, are summed before others' are added.
  struct Block {
    uint64_t number = 0;          // among all ranks' blocks
    size_t first = 0, count = 0;  // among the part's vertices
  };
  std::vector<graph::Vertex> vertices;
  std::vector<graph::Vertex> halo;  // ascending
  std::vector<Block> blocks;        // empty: another rank sums up for these vertices
  uint32_t ring = 0;                // around the own vertices of the rank's server

  size_t count() const { return vertices.size(); }
  size_t rows() const { return count() + halo.size(); }
};

/// Gradients of parameters, summed over blocks two by two, as the leaves of a tree: block 0 and 1,
/// 2 and 3, then both of these. The sum has the same bits whoever computes which block.
class BlockSums {
 public:
  struct Node {
    uint64_t first = 0, blocks = 0;  // a power of two, of which first is a multiple
    std::vector<float> sum;
  };
  /// In the order of blocks.
  void add(Node node);
  std::vector<Node>& nodes() { return nodes_; }
  /// What is left, from the last to the first; then nothing is. Empty without any.
  std::vector<float> total();

 private:
  std::vector<Node> nodes_;
};

/// A pass over one part. Threads: one caller.
class LayerPass {
 public:
  /// csr and parameters outlive it, and parts stay where they are.
  LayerPass(const graph::Csr& csr, std::span<const float> parameters, uint32_t threads);

  // Shapes: rows of a part are its own, then its halo's, [part.rows()][in]. Results are of its own
  // vertices, and stay until the next call of the same name.

  /// [count][out].
  std::span<float> forward(const Layer& layer, const Part& part, std::span<const float> rows);

  /// What the layer before needs of a vertex's gradient to make its own: its own part, and what
  /// each neighbour takes. Both [count][in]; `own` is empty for a layer of which it follows.
  struct InputGradient {
    std::span<float> own;
    std::span<float> to_neighbours;
  };
  /// After forward() of the same part. gradient: of its result, [count][out]. Adds the
  /// gradients of the layer's parameters. with_input: the layer is not the first.
  InputGradient backward(const Layer& layer, const Part& part, std::span<const float> gradient,
                         BlockSums& block_sums, bool with_input);
  /// The gradient of the result of the layer before `layer`, [count][in]: own rows, [count][in],
  /// and to_neighbours of the part and its halo, [part.rows()][in].
  std::span<float> collect(const Layer& layer, const Part& part, std::span<const float> own,
                           std::span<const float> to_neighbours);

  /// Of [count][classes]: the class with the highest value, and of vertices that are trained with
  /// (those of all that have a class in `trained`, [vertices]; -1: none) the loss, summed by block,
  /// and its gradient times `scale`, in place of the values; 0 of others.
  struct Outcome {
    std::vector<uint32_t> predicted;   // [count]
    std::vector<double> block_losses;  // [part.blocks]
  };
  Outcome loss(const Part& part, std::span<const int32_t> trained, float scale,
               std::span<float> values);

  /// Floats that a part takes at most, of all layers, without its rows.
  static uint64_t floats_of_vertex(std::span<const Layer> layers);

 private:
  template <typename F>
  void each_vertex(const Part& part, const F& f);
  void find_places(const Part& part);
  template <typename Value>
  void sum_neighbours(graph::Vertex v, std::span<const float> rows, uint32_t dim,
                      const Value& value_of, std::span<float> sum) const;
  void product(const kernels::RowMatrix& matrix, std::span<const float> x, std::span<float> y);

  const graph::Csr& csr_;
  const std::span<const float> parameters_;
  std::vector<float> scale_;  // gcn: 1 / sqrt(degree + 1)
  base::ThreadTeam team_;
  struct Worker {
    base::ThreadTeam alone{1, "product"};
    kernels::RowProduct product{alone};
  };
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<uint32_t> places_;  // of vertices among a part's rows
  const Part* placed_ = nullptr;
  std::vector<float> inputs_, sums_, normed_, results_;  // of forward()
  std::vector<float> sum_gradient_, input_gradient_, transposed_, own_, outward_;
  std::vector<float> collected_;
};

}  // namespace smartinf::workloads
