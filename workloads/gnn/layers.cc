#include "workloads/gnn/layers.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "smartinf/base/check.h"
#include "smartinf/base/units.h"

namespace smartinf::workloads {

using graph::Vertex;

namespace {

constexpr size_t kVerticesAtOnce = 256;  // of a thread
constexpr float kNormEps = 1e-5f;

/// Grows only; what was there may stay.
std::span<float> room(std::vector<float>& memory, size_t count) {
  if (memory.size() < count) memory.resize(count);
  return std::span(memory).first(count);
}

struct Moments {
  float mean, scale;  // scale: 1 / deviation
};
Moments moments(std::span<const float> row) {
  float mean = 0;
  for (const float value : row) mean += value;
  mean /= static_cast<float>(row.size());
  float squares = 0;
  for (const float value : row) squares += (value - mean) * (value - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<float>(row.size()) + kNormEps)};
}

}  // namespace

std::vector<Layer> layers_of(const ModelOptions& options, uint32_t features, uint32_t classes) {
  std::vector<Layer> layers;
  uint64_t at = 0;
  const auto take = [&](uint64_t count) { return std::exchange(at, at + count); };
  for (uint32_t l = 0; l < options.layers; ++l) {
    Layer layer;
    layer.model = options.model;
    layer.in = l == 0 ? features : options.hidden;
    layer.last = l + 1 == options.layers;
    layer.out = layer.last ? classes : options.hidden;
    layer.norm = options.model == Model::kResidualSage && !layer.last;
    layer.residual = layer.norm && l > 0;
    layer.weight = take(uint64_t{layer.out} * layer.width());
    layer.bias = take(layer.out);
    if (layer.norm) layer.factor = take(layer.out);
    if (layer.norm) layer.shift = take(layer.out);
    layer.end = at;
    layers.push_back(layer);
  }
  return layers;
}

plan::ParameterSpace space_of(std::span<const Layer> layers) {
  plan::ParameterSpace space;
  const auto add = [&](size_t layer, const char* name, std::vector<uint64_t> shape) {
    SI_CHECK(space.add(fmt::format("layers.{}.{}", layer, name), std::move(shape), 0).ok(),
             "parameters of layers");
  };
  for (size_t l = 0; l < layers.size(); ++l) {
    add(l, "weight", {layers[l].out, layers[l].width()});
    add(l, "bias", {layers[l].out});
    if (layers[l].norm) add(l, "norm.weight", {layers[l].out});
    if (layers[l].norm) add(l, "norm.bias", {layers[l].out});
  }
  return space;
}

std::vector<float> initial_parameters(std::span<const Layer> layers, uint64_t seed) {
  std::vector<float> values(space_of(layers).count());
  std::mt19937_64 random(seed);
  for (const Layer& layer : layers) {
    const double bound = std::sqrt(6.0 / (layer.width() + layer.out));
    for (uint64_t i = 0; i < uint64_t{layer.out} * layer.width(); ++i) {
      const double share = static_cast<double>(random() >> 11) * 0x1p-53;
      values[layer.weight + i] = static_cast<float>(bound * (2 * share - 1));
    }
    for (uint64_t i = 0; layer.norm && i < layer.out; ++i) values[layer.factor + i] = 1;
  }
  return values;
}

void BlockSums::add(Node node) {
  while (!nodes_.empty()) {
    Node& last = nodes_.back();
    const bool pair = last.blocks == node.blocks && last.first % (2 * last.blocks) == 0 &&
                      last.first + last.blocks == node.first;
    if (!pair) break;
    for (size_t i = 0; i < node.sum.size(); ++i) last.sum[i] += node.sum[i];
    last.blocks *= 2;
    node = std::move(last);
    nodes_.pop_back();
  }
  nodes_.push_back(std::move(node));
}

std::vector<float> BlockSums::total() {
  std::vector<float> sum;
  for (; !nodes_.empty(); nodes_.pop_back()) {
    std::vector<float>& node = nodes_.back().sum;
    for (size_t i = 0; i < sum.size(); ++i) node[i] += sum[i];
    sum = std::move(node);
  }
  return sum;
}

LayerPass::LayerPass(const graph::Csr& csr, std::span<const float> parameters, uint32_t threads)
    : csr_(csr),
      parameters_(parameters),
      scale_(csr.vertices()),
      team_(threads, "gnn"),
      places_(csr.vertices()) {
  for (Vertex v = 0; v < csr.vertices(); ++v) {
    scale_[v] = 1 / std::sqrt(static_cast<float>(csr.degree(v) + 1));
  }
  for (uint32_t i = 0; i < team_.size(); ++i) workers_.push_back(std::make_unique<Worker>());
}

uint64_t LayerPass::floats_of_vertex(std::span<const Layer> layers) {
  uint64_t most = 0;
  for (const Layer& layer : layers) {
    // inputs and their gradient, sums, their gradient, normed, results; own and outward rows.
    most = std::max<uint64_t>(most, 2 * layer.width() + 6 * layer.out + 3 * layer.in);
  }
  return most;
}

template <typename F>
void LayerPass::each_vertex(const Part& part, const F& f) {
  team_.run(base::divide_up(part.count(), kVerticesAtOnce), [&](uint32_t /*worker*/, size_t index) {
    const size_t end = std::min<size_t>(part.count(), (index + 1) * kVerticesAtOnce);
    for (size_t i = index * kVerticesAtOnce; i < end; ++i) f(i);
  });
}

void LayerPass::find_places(const Part& part) {
  if (placed_ == &part) return;
  placed_ = &part;
  uint32_t place = 0;
  for (const auto* vertices : {&part.vertices, &part.halo}) {
    for (const Vertex v : *vertices) places_[v] = place++;
  }
}

/// The sum of value_of(neighbour) times its row, in the neighbours' order.
template <typename Value>
void LayerPass::sum_neighbours(Vertex v, std::span<const float> rows, uint32_t dim,
                               const Value& value_of, std::span<float> sum) const {
  for (const Vertex to : csr_.neighbours(v)) {
    const float* const row = rows.data() + size_t{places_[to]} * dim;
    const float factor = value_of(to);
    for (uint32_t d = 0; d < dim; ++d) sum[d] += factor * row[d];
  }
}

void LayerPass::product(const kernels::RowMatrix& matrix, std::span<const float> x,
                        std::span<float> y) {
  const size_t rows = x.size() / matrix.inputs;
  const size_t some = std::clamp<size_t>(base::divide_up(rows, team_.size()), 1, kVerticesAtOnce);
  team_.run(base::divide_up(rows, some), [&](uint32_t worker, size_t index) {
    const size_t first = index * some;
    const size_t count = std::min(some, rows - first);
    workers_[worker]->product.run(matrix, x.subspan(first * matrix.inputs, count * matrix.inputs),
                                  y.subspan(first * matrix.outputs, count * matrix.outputs));
  });
}

std::span<float> LayerPass::forward(const Layer& layer, const Part& part,
                                    std::span<const float> rows) {
  find_places(part);
  const uint32_t width = layer.width();
  const std::span<float> inputs = room(inputs_, part.count() * width);
  each_vertex(part, [&](size_t i) {
    const auto v = part.vertices[i];
    const auto own = rows.subspan(i * layer.in, layer.in);
    auto input = inputs.subspan(i * width, width);
    if (layer.model == Model::kGcn) {
      for (uint32_t d = 0; d < layer.in; ++d) input[d] = scale_[v] * own[d];
      sum_neighbours(
          v, rows, layer.in, [&](Vertex to) { return scale_[to]; }, input);
      for (float& value : input) value *= scale_[v];
      return;
    }
    std::ranges::copy(own, input.begin());
    if (!layer.beside()) return;
    const auto mean = input.subspan(layer.in);
    std::ranges::fill(mean, 0.0f);
    sum_neighbours(
        v, rows, layer.in, [](Vertex) { return 1.0f; }, mean);
    const float share = 1 / static_cast<float>(std::max<uint64_t>(1, csr_.degree(v)));
    for (float& value : mean) value *= share;
  });
  const std::span<float> sums = room(sums_, part.count() * layer.out);
  product({.weights = parameters_.data() + layer.weight,
           .bias = parameters_.data() + layer.bias,
           .type = base::DataType::kF32,
           .outputs = layer.out,
           .inputs = width},
          inputs, sums);
  const std::span<float> results = room(results_, sums.size());
  if (layer.last) {
    std::ranges::copy(sums, results.begin());
    return results;
  }
  const std::span<float> normed = layer.norm ? room(normed_, sums.size()) : sums;
  each_vertex(part, [&](size_t i) {
    const auto sum = sums.subspan(i * layer.out, layer.out);
    const auto norm = normed.subspan(i * layer.out, layer.out);
    if (layer.norm) {
      const auto [mean, scale] = moments(sum);
      const float* const factor = parameters_.data() + layer.factor;
      const float* const shift = parameters_.data() + layer.shift;
      for (uint32_t d = 0; d < layer.out; ++d) {
        norm[d] = (sum[d] - mean) * scale * factor[d] + shift[d];
      }
    }
    for (uint32_t d = 0; d < layer.out; ++d) {
      const float result = std::max(0.0f, norm[d]);
      results[i * layer.out + d] = layer.residual ? rows[i * layer.in + d] + result : result;
    }
  });
  return results;
}

LayerPass::InputGradient LayerPass::backward(const Layer& layer, const Part& part,
                                             std::span<const float> gradient, BlockSums& block_sums,
                                             bool with_input) {
  const uint32_t out = layer.out;
  const uint32_t width = layer.width();
  const std::span<float> inputs = std::span(inputs_).first(part.count() * width);
  const std::span<float> sums = std::span(sums_).first(part.count() * out);
  const std::span<float> normed = layer.norm ? std::span(normed_).first(part.count() * out) : sums;
  // Of what enters relu, and of the sums.
  const std::span<float> sum_gradient = room(sum_gradient_, 2 * sums.size()).first(sums.size());
  const std::span<float> norm_gradient = std::span(sum_gradient_).subspan(sums.size(), sums.size());
  each_vertex(part, [&](size_t i) {
    const size_t at = i * out;
    for (uint32_t d = 0; d < out; ++d) {
      norm_gradient[at + d] = layer.last || normed[at + d] > 0 ? gradient[at + d] : 0.0f;
    }
    if (!layer.norm) {
      std::copy_n(norm_gradient.begin() + static_cast<int64_t>(at), out,
                  sum_gradient.begin() + static_cast<int64_t>(at));
      return;
    }
    const auto [mean, scale] = moments(sums.subspan(at, out));
    const float* const factor = parameters_.data() + layer.factor;
    float along = 0;  // means of the gradient, and of it times what was normed
    float across = 0;
    for (uint32_t d = 0; d < out; ++d) {
      const float g = norm_gradient[at + d] * factor[d];
      along += g;
      across += g * (sums[at + d] - mean) * scale;
    }
    along /= static_cast<float>(out);
    across /= static_cast<float>(out);
    for (uint32_t d = 0; d < out; ++d) {
      const float g = norm_gradient[at + d] * factor[d];
      sum_gradient[at + d] = scale * (g - along - (sums[at + d] - mean) * scale * across);
    }
  });

  for (const auto& [number, first, count] : part.blocks) {
    const std::span<float> transposed = room(transposed_, count * out);
    std::vector<float> block(layer.end - layer.weight);
    float* const column_sums = block.data() + (layer.bias - layer.weight);  // bias, factor, shift
    for (size_t i = 0; i < count; ++i) {
      const size_t at = (first + i) * out;
      const Moments of = layer.norm ? moments(sums.subspan(at, out)) : Moments{};
      for (uint32_t d = 0; d < out; ++d) {
        transposed[d * count + i] = sum_gradient[at + d];
        column_sums[d] += sum_gradient[at + d];
        if (!layer.norm) continue;
        column_sums[out + d] += norm_gradient[at + d] * (sums[at + d] - of.mean) * of.scale;
        column_sums[2 * out + d] += norm_gradient[at + d];
      }
    }
    if (count > 0) {
      product({.weights = inputs.data() + first * width,
               .type = base::DataType::kF32,
               .outputs = width,
               .inputs = count,
               .transposed = true},
              transposed, std::span(block).first(size_t{out} * width));
    }
    block_sums.add({number, 1, std::move(block)});
  }
  if (!with_input) return {};

  const std::span<float> input_gradient = room(input_gradient_, part.count() * width);
  product({.weights = parameters_.data() + layer.weight,
           .type = base::DataType::kF32,
           .outputs = width,
           .inputs = out,
           .transposed = true},
          sum_gradient, input_gradient);
  InputGradient result;
  result.to_neighbours = room(outward_, part.count() * layer.in);
  if (layer.beside() || !layer.neighbours()) result.own = room(own_, part.count() * layer.in);
  each_vertex(part, [&](size_t i) {
    const auto v = part.vertices[i];
    const float* const in = input_gradient.data() + i * width;
    const size_t at = i * layer.in;
    if (layer.model == Model::kGcn) {
      for (uint32_t d = 0; d < layer.in; ++d) result.to_neighbours[at + d] = scale_[v] * in[d];
      return;
    }
    for (uint32_t d = 0; d < layer.in; ++d) {
      result.own[at + d] = layer.residual ? in[d] + gradient[at + d] : in[d];
    }
    const float share = 1 / static_cast<float>(std::max<uint64_t>(1, csr_.degree(v)));
    for (uint32_t d = 0; layer.beside() && d < layer.in; ++d) {
      result.to_neighbours[at + d] = share * in[layer.in + d];
    }
  });
  return result;
}

std::span<float> LayerPass::collect(const Layer& layer, const Part& part,
                                    std::span<const float> own,
                                    std::span<const float> to_neighbours) {
  find_places(part);
  const std::span<float> collected = room(collected_, part.count() * layer.in);
  each_vertex(part, [&](size_t i) {
    const auto v = part.vertices[i];
    const auto sum = collected.subspan(i * layer.in, layer.in);
    const std::span<const float> mine = layer.model == Model::kGcn ? to_neighbours : own;
    std::ranges::copy(mine.subspan(i * layer.in, layer.in), sum.begin());
    if (!layer.neighbours()) return;
    sum_neighbours(
        v, to_neighbours, layer.in, [](Vertex) { return 1.0f; }, sum);
    if (layer.model != Model::kGcn) return;
    for (float& value : sum) value *= scale_[v];
  });
  return collected;
}

LayerPass::Outcome LayerPass::loss(const Part& part, std::span<const int32_t> trained, float scale,
                                   std::span<float> values) {
  const size_t classes = values.size() / part.count();
  Outcome outcome;
  outcome.predicted.resize(part.count());
  std::vector<double> losses(part.count());
  each_vertex(part, [&](size_t i) {
    const Vertex v = part.vertices[i];
    const auto row = values.subspan(i * classes, classes);
    const auto highest = std::ranges::max_element(row);
    outcome.predicted[i] = static_cast<uint32_t>(highest - row.begin());
    if (trained[v] < 0) {
      std::ranges::fill(row, 0.0f);
      return;
    }
    const float most = *highest;
    double sum = 0;
    for (const float value : row) sum += std::exp(static_cast<double>(value - most));
    const auto label = static_cast<size_t>(trained[v]);
    losses[i] = std::log(sum) - static_cast<double>(row[label] - most);
    for (size_t c = 0; c < classes; ++c) {
      const double share = std::exp(static_cast<double>(row[c] - most)) / sum;
      row[c] = scale * static_cast<float>(share - (c == label ? 1.0 : 0.0));
    }
  });
  for (const Part::Block& block : part.blocks) {
    double sum = 0;
    for (size_t i = block.first; i < block.first + block.count; ++i) sum += losses[i];
    outcome.block_losses.push_back(sum);
  }
  return outcome;
}

}  // namespace smartinf::workloads
